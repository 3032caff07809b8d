#!/bin/sh
# Prepares data by spark-submit, in cluster mode: the driver's pod runs `outlast data prepare ... --engine spark` on a claim of the
# namespace zip that all pods mount at /data (ReadWriteMany). When the driver is lost, delete it and submit again: the same command goes on from what is finished.
#
#   kubectl apply -f examples/spark/accounts.yaml
#   export PREPARE='text /data/corpus --to /data/tokens --shard-size 64Mi' CLAIM=efs-pvc
#   sh examples/spark/prepare.sh --conf spark.executor.instances=8
#   kubectl logs -n zip -f prepare-driver
#
# KUBERNETES, the rights, and what is given to this script are as for spark-python-pi.sh, which has the settings for any program. PROGRAM is
# the command in the image; an image of yours has a file with `from outlast.cli import main; main()`, and not called outlast.py.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
export PROGRAM="${PROGRAM:-local:///opt/outlast/outlast-cli.py}" ARGUMENTS="data prepare $PREPARE --engine spark"
volume=volumes.persistentVolumeClaim.data
exec sh "$here/spark-python-pi.sh" \
  --name prepare \
  --conf spark.kubernetes.driver.pod.name=prepare-driver \
  --conf spark.kubernetes.driver.$volume.mount.path=/data \
  --conf spark.kubernetes.driver.$volume.options.claimName="${CLAIM:-efs-pvc}" \
  --conf spark.kubernetes.executor.$volume.mount.path=/data \
  --conf spark.kubernetes.executor.$volume.options.claimName="${CLAIM:-efs-pvc}" \
  --conf spark.executor.memoryOverhead=2g \
  --conf spark.kubernetes.driverEnv.HOME=/tmp \
  --conf spark.executorEnv.HOME=/tmp \
  "$@"
