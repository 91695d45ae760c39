/* Reads neighbouring pages, and hashes each piece while the core's own cache still has it.
 *
 * Of XXH3 it gets the functions' addresses: the hash is python-xxhash's, and there is one implementation of it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

struct part {
    unsigned char *at;
    uint64_t bytes;
    uint64_t page; /* The number of the page whose payload it is a part of, from 1; 0: it is not hashed. */
};

struct digest {
    uint64_t low, high;
};

struct xxh3 {
    void *(*create)(void);
    int (*release)(void *state);
    int (*reset)(void *state);
    int (*update)(void *state, const void *bytes, size_t count);
    struct digest (*digest)(const void *state);
};

enum { VECTORS = 1024 }; /* the most that Linux takes */

/* XXH3's canonical form, as digest() of python-xxhash: big-endian, the high half first. */
static void write_digest(struct digest digest, unsigned char *into)
{
    for (int byte = 0; byte < 8; byte++) {
        into[byte] = (unsigned char)(digest.high >> (56 - 8 * byte));
        into[8 + byte] = (unsigned char)(digest.low >> (56 - 8 * byte));
    }
}

/* Fill the parts with the file's bytes from offset on, and hash the payload of each page: the 16 bytes of page p go to
 * digests + 16 * (p - 1). Pages without a part keep what is there.
 *
 * Returns the number of bytes read, fewer than asked for only where the file ends; or minus an errno.
 */
int64_t toolgap_read_strip(int fd, int64_t offset, const struct part *parts, uint64_t count, unsigned char *digests,
                           uint64_t piece_bytes, const struct xxh3 *xxh3)
{
    void *state = xxh3->create();
    if (!state)
        return -ENOMEM;

    int64_t total = 0;
    uint64_t part = 0, inside = 0, page = 0;
    while (part < count) {
        struct iovec vectors[VECTORS];
        int used = 0;
        uint64_t left = piece_bytes;
        for (uint64_t next = part, from = inside; next < count && used < VECTORS && left; next++, from = 0) {
            uint64_t bytes = parts[next].bytes - from;
            if (bytes > left)
                bytes = left;
            vectors[used].iov_base = parts[next].at + from;
            vectors[used].iov_len = bytes;
            used++;
            left -= bytes;
        }
        ssize_t got;
        do
            got = preadv(fd, vectors, used, offset + total);
        while (got < 0 && errno == EINTR);
        if (got < 0) {
            total = -errno;
            break;
        }
        if (got == 0)
            break;
        total += got;

        for (uint64_t rest = (uint64_t)got; rest;) {
            const struct part *now = &parts[part];
            uint64_t bytes = now->bytes - inside;
            if (bytes > rest)
                bytes = rest;
            if (now->page) {
                if (now->page != page) {
                    if (page)
                        write_digest(xxh3->digest(state), digests + 16 * (page - 1));
                    page = now->page;
                    xxh3->reset(state);
                }
                xxh3->update(state, now->at + inside, bytes);
            }
            rest -= bytes;
            inside += bytes;
            if (inside == now->bytes) {
                part++;
                inside = 0;
            }
        }
    }
    if (page && total >= 0)
        write_digest(xxh3->digest(state), digests + 16 * (page - 1));
    xxh3->release(state);
    return total;
}
