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
