#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
r(){ timeout 400 ./cachemc "$@" | head -1; }
r 1 60000000; r 7 60000000; r 3 9000000; r 11 9000000; r 9 9000000; r 5 9000000; r 2 30000000; r 2 30000000 c1 f0; r 6 30000000 c0; r 8 60000000
r 7 30000000 strict; r 7 30000000 evfree; r 4 9000000 noalien; r 4 9000000 qnoscan; r 7 9000000 ownerreads; r 7 60000000 novoid noinv nop2; r 7 30000000 freewriting noinv nop2 nop3; r 7 30000000 nodekker nochecks noinv nop2 nop3
r 12 60000000; r 13 60000000; r 13 60000000 giveunstamped; r 13 60000000 givefenced
