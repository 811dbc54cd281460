"""Scheduler of an engine: requests, block pools and the plan of each step. Pure.

The engine's step is schedule, run, apply, emit. `Scheduler.schedule` makes a frozen `StepPlan`,
`ModelRunner.run` computes it and samples, `Scheduler.apply` applies its results. Inside,
`RequestStates` holds the state of every sequence (waiting, running, swapped, ...), `Planner`
fills a step under the budgets, with what `Admission` admits and the room that `Preemptor` makes,
and `OutputProcessor` applies the results. Sequences that run are rows of `BatchSlots`, which the
runner reads too.

A prompt may continue from blocks that another one computes in the same step
(`kv/pending_blocks.py`): in each layer, attention writes the K and V of all of the step's tokens
before it reads any. Such blocks are in the prefix cache, and known to other workers, once the
step's results are applied. A prompt whose next block a later step of another one computes is held
back until then.

A prompt with images has a span of placeholder tokens for each (`sequences/encoder_inputs.py`, ADR
0044). Spans count against an encoder budget per step, and their outputs have blocks of a pool of
their own, cached by content hash (`kv/encoder_cache.py`). Encode jobs
(`scheduling/encode_jobs.py`, ADR 0047) hold outputs for other workers, or expect one of another
worker: until it has arrived or is given up, chunks end before its image. Chunks do not cut an
image whose tokens see each other in both directions (ADR 0046).

A sequence without room is swapped to host memory, recomputed or given back to the router,
whichever costs least (`scheduling/preemptor.py`). On a GPU a step is launched before the one
before it is applied (`scheduling/ahead_planner.py`, ADR 0012, ADR 0039).
"""
