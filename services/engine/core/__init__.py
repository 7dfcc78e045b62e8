"""The pure core: requests, blocks, prefix cache, scheduler. No torch, no asyncio, no bus, no clock, no randomness.

`Core.add`, `Core.abort`, `Core.schedule() -> StepPlan`, `Core.apply(plan, result) -> outcomes` are its whole surface.
"""
