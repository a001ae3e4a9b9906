"""The ASGI side of `benchmarks serve-tax`: the same application under uvicorn, in its own process.

    python tests/benchmarks/serving/serve_tax_server.py settings.json PORT

The worker is an actor, as in a replica; no Serve and no HAProxy. Ends on SIGTERM or Ctrl-C.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import uvicorn
from manta.actors.engine.async_engine import AsyncEngine
from manta.actors.http.app import create_app
from manta.actors.http.config.settings_mapping import split_settings
from manta.actors.workers.ray_executor import RayExecutor
from manta.jobs.common.ray_session import join_or_start_ray


async def serve(settings: Path, port: int) -> None:
    config, front = split_settings(json.loads(settings.read_text(encoding="utf-8")))
    join_or_start_ray(log_to_driver=False)
    engine = AsyncEngine(config, RayExecutor)
    await engine.start()
    try:
        app = create_app(engine, front)
        await uvicorn.Server(uvicorn.Config(app, port=port, log_config=None, access_log=False)).serve()
    finally:
        await asyncio.to_thread(engine.close)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
