from collections.abc import Callable, Iterable, Sequence

from unimem._core.block import Block

def load(
    parts: Iterable[tuple[int, int, Block, int, int, str]],
    *,
    threads: int | None = None,
    cpus: Sequence[int] | None = None,
    direct: bool = False,
    request_bytes: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> None: ...
def move_pages(block: Block, numa: str | None) -> list[str]: ...
