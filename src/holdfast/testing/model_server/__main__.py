"""``python -m holdfast.testing.model_server``: serve a model until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import suppress

from holdfast.agents.model_lookup import find_model
from holdfast.testing.model_server import ModelServer


async def _main(model_name: str, port: int) -> None:
    async with ModelServer(find_model(model_name), port=port) as server:
        lines = [f"{name}={value}" for name, value in server.environment.items()]
        sys.stdout.write(f"{model_name} answers on {server.url}\n\n" + "\n".join(f"export {line}" for line in lines))
        sys.stdout.write("\n\nPress Ctrl-C to stop.\n")
        sys.stdout.flush()
        await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m holdfast.testing.model_server",
        description="Serve a model over OpenAI's and Anthropic's protocols, until Ctrl-C.",
    )
    parser.add_argument("--model", default="scripted:demo", help="model that answers (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8421, help="port to listen on (default: %(default)s)")
    flags = parser.parse_args()
    with suppress(KeyboardInterrupt):
        asyncio.run(_main(flags.model, flags.port))
