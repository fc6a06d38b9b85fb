#!/bin/sh
# Writes the traces of the recordings: `sh tests/recorded/make_traces.sh FOLDER`. Seeded, so equal in every run.
set -eu
make() { name=$1; shift; ${PYTHON:-python} -m serving trace generate "$out/$name.jsonl" "$@"; }
out=$1
make chat --requests 200 --seed 101 --rate 16 \
  --prompt lognormal:400:0.9:16:2000 --output-tokens lognormal:150:0.7:4:600
make long --requests 60 --seed 102 --rate 5 \
  --prompt lognormal:12000:1.3:512:130000 --output-tokens lognormal:60:0.6:8:200
make saturated --requests 120 --seed 103 --rate 40 \
  --prompt lognormal:700:0.6:64:3000 --output-tokens lognormal:350:0.5:32:900
make mixed --requests 150 --seed 104 --rate 13 \
  --prompt lognormal:2200:0.9:64:12000 --output-tokens lognormal:120:0.7:4:500
make prefixes --requests 160 --seed 105 --arrivals gamma --burstiness 0.4 --rate 14 \
  --prompt lognormal:300:0.8:16:2000 --output-tokens lognormal:110:0.6:8:500 \
  --prefixes 4 --prefix-tokens 2048 --prefix-share 0.85
make heldout --requests 130 --seed 106 --arrivals gamma --burstiness 0.5 --rate 12 \
  --prompt lognormal:1800:1.1:32:20000 --output-tokens lognormal:130:0.8:4:500
