"""What a web service does with the asyncio client: one client for its whole life, many requests at once.

`lifespan` is what FastAPI and Starlette take under that name; `similar` would be the body of an endpoint.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from serving.client import AsyncClient, Hit
from serving.errors import BadImage, DeadlineExceeded, Overloaded, Unavailable


@asynccontextmanager
async def lifespan(address: str) -> AsyncIterator[AsyncClient]:
    """Open the client when the service starts, and close it when it ends."""
    # A person waits for the answer, so it is better to say soon that there is none.
    async with AsyncClient(address, timeout=2.0, retries=3) as client:
        yield client


async def similar(client: AsyncClient, gallery: str, photo: bytes, k: int) -> tuple[int, list[Hit] | str]:
    """Answer one upload with an HTTP status and the nearest items, or what to tell the user.

    When the user leaves, the framework cancels this, and the server drops the search.
    """
    try:
        (hits,) = await client.search(gallery, images=[photo], k=k)
    except BadImage as error:
        return 400, str(error)
    except (Overloaded, Unavailable, DeadlineExceeded):
        return 503, "The search is busy; please try again."
    return 200, hits


async def main(address: str, gallery: str, *photos: bytes) -> list[tuple[int, list[Hit] | str]]:
    """Answer several uploads at once."""
    async with lifespan(address) as client:
        return await asyncio.gather(*(similar(client, gallery, photo, 5) for photo in photos))


if __name__ == "__main__":
    found = asyncio.run(main(sys.argv[1], sys.argv[2], *(Path(path).read_bytes() for path in sys.argv[3:])))
    for status, told in found:
        sys.stdout.write(f"{status} {told}\n")
