"""`asel cache`: inspect, move and clean caches."""

from __future__ import annotations

import typer

from asel.cli.cache.diff import diff
from asel.cli.cache.ls import ls
from asel.cli.cache.move import export, import_
from asel.cli.cache.prune import prune
from asel.cli.cache.show import show
from asel.cli.cache.stats import stats
from asel.cli.cache.verify import verify
from asel.cli.cache.why import why
from asel.cli.examples import examples

__all__ = ["cache_app"]

cache_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Inspect a cache, move it, clean it.",
    epilog=examples("asel cache ls", "asel cache show matmul --store redis://cache.example:6379"),
)
cache_app.command(epilog=examples("asel cache ls", "asel cache ls --store ./configs --op matmul --json"))(ls)
cache_app.command(epilog=examples("asel cache show 5c78ba9a", "asel cache show matmul --store configs.json"))(show)
cache_app.command(epilog=examples("asel cache why 5c78ba9a", "asel cache why 'matmul@v1(a=f32[512,512]'"))(why)
cache_app.command(epilog=examples("asel cache diff laptop.json redis://cache.example:6379"))(diff)
cache_app.command(epilog=examples("asel cache export configs.json --store matmul --op matmul"))(export)
cache_app.command("import", epilog=examples("asel cache import configs.json --store redis://cache.example:6379"))(
    import_
)
cache_app.command(
    epilog=examples("asel cache prune --older-than 90d --store matmul", "asel cache prune --not-jax 0.10.2")
)(prune)
cache_app.command(epilog=examples("asel cache stats", "asel cache stats --store configs.json --json"))(stats)
cache_app.command(
    epilog=examples(
        "asel cache verify --kernel serving.kernels:matmul",
        "asel cache verify --kernel kernels.py:matmul --store redis://cache.example:6379 --sample 20",
    )
)(verify)
