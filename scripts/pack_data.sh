#!/usr/bin/env bash
# A folder of prepared tokens in parts, for a machine without a network that is sent little at a time.
#
#     scripts/pack_data.sh data/mini PARTS [BYTES]     # PARTS/mini.a, PARTS/mini.b, ..., each of at most BYTES
#     cat mini.? | xz -dc | tar x -C data              # there; data.path=data/mini, and data.files as they were typed here
#
# Token ids are 16 bits wide, which lp=1,pb=1 tells xz. The 151M tokens of experiment=mini, 304 MB, become 109 MB.
set -euo pipefail
folder=${1:?the folder of prepared tokens} parts=${2:?the folder for the parts} bytes=${3:-62000000}
name=$(basename "$folder")
mkdir -p "$parts"
tar -c --sort=name --exclude=lock -C "$(dirname "$folder")" "$name" |
    xz -T2 --block-size=160MiB --lzma2=preset=6,dict=160MiB,lp=1,pb=1,lc=3 |
    split -b "$bytes" -a 1 - "$parts/$name."
ls -l "$parts/$name."?
