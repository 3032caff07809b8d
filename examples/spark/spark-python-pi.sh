#!/bin/sh
# Spark's Pi on Kubernetes: 128,000 tasks on 50 executors of 4 cores, the driver kept as a completed pod. Spark starts the driver in
# the cluster (--deploy-mode cluster); what is given to this script is given to spark-submit, and wins:
#
#   kubectl apply -f examples/spark/accounts.yaml
#   sh examples/spark/spark-python-pi.sh                                                              in a pod with the account spark-submit
#   KUBERNETES=https://... sh examples/spark/spark-python-pi.sh --conf spark.executor.instances=2     from elsewhere, by your kubeconfig
#   kubectl logs -n zip spark-python-pi-driver | grep 'Pi is roughly'
#
# KUBERNETES is the API server (kubectl config view --minify -o 'jsonpath={.clusters[0].cluster.server}'), PROGRAM the program, in the
# image, and ARGUMENTS its words, here the number of tasks. It needs PySpark and a Java, as the image does.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
exec spark-submit --master "k8s://${KUBERNETES:-https://kubernetes.default.svc:443}" \
  --deploy-mode cluster \
  --name spark-python-pi \
  --conf spark.executor.instances=50 \
  --conf spark.kubernetes.container.image=ghcr.io/outlast/outlast:0.1-spark \
  --conf spark.kubernetes.driver.pod.name=spark-python-pi-driver \
  --conf spark.kubernetes.namespace=zip \
  --conf spark.kubernetes.driver.annotation.sidecar.istio.io/inject=false \
  --conf spark.kubernetes.executor.annotation.sidecar.istio.io/inject=false \
  --conf spark.kubernetes.executor.request.cores=4 \
  --conf spark.kubernetes.authenticate.driver.serviceAccountName=spark \
  --conf spark.executor.cores=4 \
  --conf spark.kubernetes.driver.podTemplateFile="$here/driver.yaml" \
  --conf spark.kubernetes.executor.podTemplateFile="$here/executor.yaml" \
  --conf spark.kubernetes.executor.disableConfigMap=true \
  --conf spark.kubernetes.driver.service.deleteOnTermination=false \
  --conf spark.kubernetes.driver.ownPersistentVolumeClaim=false \
  --conf spark.kubernetes.driver.reusePersistentVolumeClaim=false \
  --conf spark.decommission.enabled=true \
  --conf spark.executor.decommission.signal=TERM \
  --conf spark.kubernetes.decommission.script=/bin/true \
  "$@" \
  "${PROGRAM:-local:///opt/spark/examples/src/main/python/pi.py}" ${ARGUMENTS:-128000}
