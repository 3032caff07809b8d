#!/bin/sh
# Records docs/kill.svg: the example of the README, trained twice, killed in the second training. From the root of a clone:
#
#   pip install asciinema termtosvg && PATH=.venv/bin:$PATH docs/kill.sh
set -eu
dir=$(mktemp -d)
cp -r examples "$dir"
docs=$(pwd)/docs
cd "$dir"
outlast data get digits >/dev/null
outlast run examples/digits.yaml --name calm >/dev/null 2>&1
cat > shown.sh <<'END'
echo '$ outlast run examples/digits.yaml --name killed --chaos examples/chaos/demo.yaml'
outlast run examples/digits.yaml --name killed --chaos examples/chaos/demo.yaml
echo '$ sha256sum .outlast/runs/*/model.pt'
sha256sum .outlast/runs/*/model.pt
sleep 5
END
asciinema rec -q --cols 108 --rows 26 -c "sh shown.sh" kill.cast
sed -i "s|$dir/||g" kill.cast
termtosvg render kill.cast "$docs/kill.svg" -m 300 -M 1500 -t window_frame
rm -r "$dir"
