"""The recipes, by name."""

from typing import Any

from toolgap.bench.recipe import Recipe
from toolgap.bench.recipes.admission import Admission
from toolgap.bench.recipes.bystanders import Bystanders
from toolgap.bench.recipes.early_return import EarlyReturn
from toolgap.bench.recipes.gateway import ThroughGateway
from toolgap.bench.recipes.many_agents import ManyAgents
from toolgap.bench.recipes.matrix import Matrix
from toolgap.bench.recipes.no_continuation import NoContinuation
from toolgap.bench.recipes.overhead import Overhead
from toolgap.bench.recipes.replay import Replay
from toolgap.bench.recipes.store import StoreBeside

_ALL: tuple[Recipe[Any], ...] = (
    Matrix(),
    EarlyReturn(),
    NoContinuation(),
    Bystanders(),
    Overhead(),
    ManyAgents(),
    Admission(),
    Replay(),
    StoreBeside(),
    ThroughGateway(),
)

RECIPES = {recipe.name: recipe for recipe in _ALL}
