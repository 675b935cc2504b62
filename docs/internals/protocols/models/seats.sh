#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The seat model: what holds, then each rule dropped.
r(){ echo "== $*"; timeout 200 ./bootmc "$@" | cut -c1-1200; }
r np=2 nm=2 crashes=2 restarts=2 retries=2 releases=1 states=1 every=97 cap=30
r nm=3 crashes=0 restarts=0 retries=0 states=0 every=97 cap=30
r nm=3 crashes=1 restarts=0 retries=1 states=1 every=997 cap=30
r np=3 nm=2 crashes=1 restarts=1 retries=2 releases=2 states=1 every=997 cap=30
r drop=no_door_check nm=2
r drop=no_name_check nm=2
r drop=places_used_again nm=2
r drop=collect_before_claim nm=2
r drop=no_collect nm=2
r drop=accept_without_check nm=2
r drop=check_own_ballot_only nm=2
r drop=ballots_not_unique nm=2
r drop=highest_generation nm=3 crashes=1 retries=2
r drop=shared_copy nm=2
r drop=suspicion_is_proof nm=2
r drop=release_not_compared nm=2 releases=1 retries=2 restarts=2
r drop=release_is_not_last nm=2 releases=1
r drop=death_is_number nm=2 crashes=1 retries=2
r drop=sessions_overlap nm=2 restarts=1 crashes=0
# A seat for every slot: what holds, then each rule dropped.
r(){ echo "== $*"; timeout 900 ./slotseatmc "$@" | cut -c1-1200; }
r nm=2 claims=4 crashes=1 leaves=1
r nm=3 claims=3 crashes=1
r drop=seat_before_accept nm=3 claims=4 crashes=0
for rule in accept_without_check left_before_resigned boot_seat_served_after_release collect_before_claim no_collect new_owner_forgets suspicion_is_proof; do r drop=$rule nm=2 claims=4 crashes=1 leaves=1 again=1 retries=1; done
