#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
r(){ echo "== $*"; timeout 110 ./lockmc "$@" | cut -c1-1500; }
r drop=accept_without_check S=1 cap=30
r drop=check_before_grant_read S=1 cap=30
r drop=check_own_manager_only S=1 cap=30
r drop=collect_before_claim S=1 cap=30
r drop=no_collect S=1 cap=30
r drop=adopt_by_grant_number S=1 claims=3 cap=30
r drop=restart_clears_seat_rows S=1 claims=3 fences=0 rejoins=1 cap=30
r drop=epochs_not_unique S=1 cap=30
r drop=shared_grant_line S=1 cap=30
r drop=manager_self_shortcut S=1 clients=3 cap=30
r drop=grant_before_fence S=0 cap=30
r drop=check_then_write S=0 cap=30
r drop=no_fence_check S=0 cap=30
r drop=no_seal S=0 cap=30
r drop=fence_row_of_granter_only S=0 cap=30
r drop=no_incarnation S=0 cap=30
r drop=no_reqno S=1 cancels=1 reqs=2 crashes=0 rejoins=0 cap=30
r drop=cancel_counts_as_repaired S=0 claims=1 cancels=1 reqs=2 crashes=1 rejoins=1 fences=2 cap=40
r drop=suspicion_is_proof S=1 cap=30
r B=1 S=0 drop=no_quarantine reqs=2 cap=30
r B=1 S=0 drop=no_intent reqs=2 cap=30
r B=1 S=0 drop=intent_after_check reqs=2 cap=30
r B=1 S=0 drop=no_check_after_intent reqs=2 cap=30
# survives on purpose: check after B3 is not needed for safety
r B=1 S=0 drop=no_confirm_check reqs=2 claims=1 cap=40
r B=1 S=0 drop=adopt_on_fence cap=30
# lines that stop to verify (LOCKS.md 12.18): the rules hold, and each of them is needed
r S=1 dmg=2 claims=3 crashes=0 rejoins=0 fences=0 cap=30
r S=1 dmg=1 claims=3 crashes=1 rejoins=1 fences=0 cap=30
r S=1 dmg=1 claims=3 crashes=1 rejoins=1 fences=0 old=1 cap=30
r S=1 dmg=1 claims=3 crashes=1 rejoins=0 drop=heal.adopt_best_readable cap=30
r S=1 dmg=1 claims=3 crashes=1 rejoins=1 fences=0 old=1 drop=heal.claim_ignores_tags cap=30
r S=1 dmg=1 claims=3 crashes=1 rejoins=1 fences=0 old=1 drop=heal.seat_forgets cap=30
w(){ echo "== witness $*"; timeout 110 ./witnessmc "$@" crashes=2 rejoins=2 fences=2 | cut -c1-1500; }
w shape=shared; w shape=nodes; w shape=twins; w shape=three; w shape=three kernels=2
# holds on purpose: the code waits for no fence
for shape in shared nodes twins "three kernels=2"; do w drop=not_fenced_first shape=$shape; done
timeout 110 ./witnessmc drop=not_fenced_first shape=three
w drop=gap_between_marks shape=shared
w drop=not_retired shape=nodes
w drop=not_read_again shape=nodes
w drop=twin_joins shape=twins
w drop=nonce_not_compared shape=three
w drop=kernel_not_compared shape=three kernels=2
w drop=asked_before_read shape=shared
w drop=unflushed shape=three
w drop=own_unflushed shape=twins
