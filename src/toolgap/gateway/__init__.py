"""A reverse proxy in front of SGLang that passes everything as it is (``pip install 'toolgap[gateway]'``)."""
