#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# variant runs: cfg cap flags...
r(){ timeout 100 ./cachemc "$@" > cex/tmp.txt; n=$(echo "$*"|tr ' ' '_'); mv cex/tmp.txt cex/$n.txt; head -1 cex/$n.txt; }
mkdir -p cex; M=25000000
r 3 $M norefetch
r 3 $M norefetch f0
r 7 $M novoid noinv nop2
r 7 $M novoid2 noinv nop2
r 7 $M novoid1
r 7 $M freewriting
r 7 $M freewriting noinv nop2 nop3
r 3 $M pinsfirst
r 3 $M pinsfirst norefetch f0 nop2
r 7 $M nodekker
r 7 $M nodekker noinv nop2 nop3
r 3 $M nover
r 3 $M nover nopin
r 3 $M nocount f0
r 1 $M nokey nop2
r 3 $M readyearly noinv nop2
r 3 $M pinlate f0
r 3 $M nopin
r 4 $M noalien
r 4 $M noalien twoclaim
r 4 $M noclaimdekker
r 9 $M noclaimdekker
r 9 $M noclaimscan
r 7 $M nocommitchk
r 7 $M nochecks
r 4 $M nochecks
r 3 $M noflush
r 7 $M abortlate
r 7 $M abortlate noinv nop2 nop3
r 7 $M prooflies
r 7 $M prooflies noinv nop2 nop3
r 7 $M prooflies csum noinv nop2 nop3
r 5 $M rmempty
r 5 $M rmlate
r 5 $M nolock
r 7 $M ownerreads
r 7 $M evfree
r 8 $M qnoscan
r 4 $M qnoscan
r 7 $M strict
