"""The engine's core: sequences, KV blocks, prefix cache, scheduler. No torch, asyncio, bus, clock or randomness.

Its interface: `Core.add`, `Core.fork`, `Core.abort`, `Core.schedule() -> StepPlan`, `Core.apply(plan, result) ->
outcomes`, `Core.load` and `Core.counters`.
"""
