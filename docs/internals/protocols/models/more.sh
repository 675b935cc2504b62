#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
r(){ timeout 240 ./cachemc "$@" > cex/tmp.txt; n=$(echo "$*"|tr ' ' '_'); mv cex/tmp.txt cex/$n.txt; head -1 cex/$n.txt; }
M=40000000
r 11 $M
r 11 $M novoid2 noinv nop2
r 7 $M nodekker nochecks
r 7 $M nodekker nochecks noinv nop2 nop3
r 4 $M nochecks noclaimdekker
r 9 $M nochecks noclaimdekker
r 10 $M
r 10 $M rmlate
r 7 60000000 prooflies csum noinv nop2 nop3
r 6 60000000
r 2 90000000
r 2 60000000 c1 f0
r 8 120000000
