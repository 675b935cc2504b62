# SPDX-License-Identifier: Apache-2.0
"""Starts, watches, asks and ends a Dynamo graph on one machine: a frontend, prefill workers and decode workers on one pool.

    options     what can be chosen            ports        free ones of this machine
    model       the served model               pool         the pool of KV blocks
    workers     the command of each process   environment  variables of each process
    processes   children and their ends       sweep        nothing stays, whatever happens; watcher runs it if the launcher dies
    discovery   entries of living workers     readiness    when the graph answers
    client      one request                   counters     what vLLM, Dynamo and the pool count
    graph       all of it as one object       question     the round that shows and verifies what the pool does
"""
