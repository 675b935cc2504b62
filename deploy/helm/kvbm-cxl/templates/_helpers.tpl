{{/* SPDX-License-Identifier: Apache-2.0 */}}
{{/* What the templates have in common. Those that need a role take (dict "root" $ "role" "prefill"). */}}

{{- define "kvbm-cxl.name" -}}{{ .Release.Name | replace "." "-" | trunc 40 | trimSuffix "-" }}{{- end }}

{{/* Labels that pods are chosen by. They never change in the life of a release. Dynamo's Grove overwrites app.kubernetes.io/*, so they are ours. */}}
{{- define "kvbm-cxl.selector" -}}
cxl.kvbm.io/release: {{ .root.Release.Name }}
cxl.kvbm.io/component: {{ .role }}
{{- end }}

{{/* Labels of a pod: nothing that changes with the version of the chart, since a pod with other labels is another pod. part: engine or frontend. */}}
{{- define "kvbm-cxl.podLabels" -}}
app.kubernetes.io/name: kvbm-cxl
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- with .part }}
cxl.kvbm.io/part: {{ . }}
{{- end }}
{{ include "kvbm-cxl.selector" . }}
{{- end }}

{{- define "kvbm-cxl.labels" -}}
{{ include "kvbm-cxl.podLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end }}

{{- define "kvbm-cxl.needsPool" -}}{{ if ne .Values.connector "nixl-ucx" }}true{{ end }}{{- end }}

{{- define "kvbm-cxl.image" -}}{{ printf "%s:%s" .repository .tag }}{{- end }}

{{/* The identity of a host of the pool: it stays when the pod goes, and no other node or role has it. */}}
{{- define "kvbm-cxl.machine" -}}
$(NODE_NAME)/{{ .root.Release.Namespace }}/{{ .root.Release.Name }}/{{ if eq .root.Values.identity "node" }}node{{ else }}{{ .role }}{{ end }}
{{- end }}

{{- define "kvbm-cxl.stateFolder" -}}
/run/kvbm-cxl/{{ .root.Release.Namespace }}-{{ .root.Release.Name }}-{{ if eq .root.Values.identity "node" }}node{{ else }}{{ .role }}{{ end }}
{{- end }}

{{/* The pool's name, as CXL_POOL has it. */}}
{{- define "kvbm-cxl.pool" -}}
{{- $pool := .Values.pool }}
{{- $parts := concat $pool.devices (ternary (list (print "offset=" $pool.offset)) (list) (ne $pool.offset "")) }}
{{- $parts = concat $parts (ternary (list (print "size=" $pool.size)) (list) (ne $pool.size "")) }}
{{- $parts = concat $parts (ternary (list (print "metadata=" $pool.metadata)) (list) (ne $pool.metadata "")) }}
{{- $parts = concat $parts (ternary (list (print "metadata_offset=" $pool.metadataOffset)) (list) (ne $pool.metadataOffset "")) }}
{{- join "," $parts }}
{{- end }}

{{- define "kvbm-cxl.poolEnv" -}}
- {name: CXL_POOL, value: {{ include "kvbm-cxl.pool" .root | quote }}}
- {name: CXL_SUSPECT_MS, value: {{ .root.Values.pool.suspectMs | quote }}}
{{- end }}

{{- define "kvbm-cxl.hostEnv" -}}
{{ include "kvbm-cxl.poolEnv" . }}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
- {name: CXL_MACHINE_ID, value: {{ include "kvbm-cxl.machine" . | quote }}}
- {name: CXL_STATE_DIR, value: /run/kvbm-cxl}
- {name: CXL_CPUS, value: {{ .root.Values.pool.cpus | quote }}}
- {name: CXL_COPY, value: {{ .root.Values.pool.copy | quote }}}
{{- end }}

{{- define "kvbm-cxl.podSecurity" -}}
runAsUser: {{ .Values.user }}
runAsGroup: {{ .Values.group }}
runAsNonRoot: true
{{- if include "kvbm-cxl.needsPool" . }}
supplementalGroups: [{{ .Values.pool.group }}]
{{- end }}
# A volume with models becomes readable for the group.
fsGroup: {{ .Values.group }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Nothing is privileged but the way to the devices by hostPath, which no device cgroup lets through otherwise. */}}
{{- define "kvbm-cxl.poolSecurity" -}}
{{- if and (eq .Values.pool.access "host-path") (include "kvbm-cxl.needsPool" .) -}}
privileged: true
{{- else -}}
{{ include "kvbm-cxl.plainSecurity" . }}
{{- end }}
{{- end }}

{{- define "kvbm-cxl.plainSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end }}

{{/* Resources of a container that opens the pool: (dict "root" $ "resources" ... "gpus" 1). */}}
{{- define "kvbm-cxl.resources" -}}
{{- $resources := deepCopy (.resources | default dict) }}
{{- $limits := get $resources "limits" | default dict }}
{{- if .gpus }}{{ $_ := set $limits "nvidia.com/gpu" (toString .gpus) }}{{ end }}
{{- if include "kvbm-cxl.needsPool" .root }}
{{- if eq .root.Values.pool.access "device-plugin" }}{{ $_ := set $limits .root.Values.pool.resource "1" }}{{ end }}
{{- if eq .root.Values.pool.access "dra" }}{{ $_ := set $resources "claims" (list (dict "name" "pool")) }}{{ end }}
{{- end }}
{{- if $limits }}{{ $_ := set $resources "limits" $limits }}{{ end }}
{{- toYaml $resources }}
{{- end }}

{{- define "kvbm-cxl.deviceMounts" -}}
{{- if eq .Values.pool.access "host-path" }}
{{- range $number, $device := compact (append .Values.pool.devices .Values.pool.metadata) }}
- {name: cxl-device-{{ $number }}, mountPath: {{ $device }}}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvbm-cxl.deviceVolumes" -}}
{{- if eq .Values.pool.access "host-path" }}
{{- range $number, $device := compact (append .Values.pool.devices .Values.pool.metadata) }}
- name: cxl-device-{{ $number }}
  hostPath: {path: {{ $device }}, type: CharDevice}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvbm-cxl.stateVolume" -}}
- name: cxl-state
  hostPath: {path: {{ include "kvbm-cxl.stateFolder" . }}, type: DirectoryOrCreate}
{{- end }}

{{/* The kubelet makes the folder as root's. Root without any other right gives it to the user of the pool, once. image: that of the pod's
   own container, so that no other image changes the pod. */}}
{{- define "kvbm-cxl.stateInit" -}}
- name: cxl-state
  image: {{ include "kvbm-cxl.image" .image }}
  imagePullPolicy: {{ .image.pullPolicy }}
  command:
    - sh
    - -ec
    - |
      owner=$(stat -c %u /run/kvbm-cxl)
      [ "$owner" = {{ .root.Values.user }} ] || { chmod 0700 /run/kvbm-cxl; chown {{ .root.Values.user }}:{{ .root.Values.group }} /run/kvbm-cxl; }
  securityContext:
    runAsUser: 0
    runAsNonRoot: false
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL], add: [CHOWN]}
  resources: {requests: {cpu: 10m, memory: 16Mi}, limits: {memory: 64Mi}}
  volumeMounts:
    - {name: cxl-state, mountPath: /run/kvbm-cxl}
{{- end }}

{{/* Of a pod that opens the pool: where it runs, and its claim. */}}
{{- define "kvbm-cxl.placement" -}}
automountServiceAccountToken: false
{{- include "kvbm-cxl.poolPlacement" . }}
{{- end }}

{{- define "kvbm-cxl.poolPlacement" }}
{{- with .Values.images.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- with .Values.nodes.selector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .Values.nodes.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- if and (eq .Values.pool.access "dra") (include "kvbm-cxl.needsPool" .) }}
resourceClaims:
  - {name: pool, resourceClaimTemplateName: {{ include "kvbm-cxl.name" . }}-pool{{ .claim }}}
{{- end }}
{{- end }}

{{- define "kvbm-cxl.transfer" -}}
{{- if eq .Values.connector "cxl" -}}
{"kv_connector": "CxlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
{{- else -}}
{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"backends": [{{ ternary "CXL" "UCX" (eq .Values.connector "nixl-cxl") | quote }}]}}
{{- end }}
{{- end }}

{{/* Adds the fields of `more` to the object `base`, in place. Lists grow; containers and components of one name become one; of two variables of
   one name the later one counts. */}}
{{- define "kvbm-cxl.join" -}}
{{- $base := .base }}
{{- range $key, $more := .more }}
{{- $have := get $base $key }}
{{- if and (kindIs "map" $more) (kindIs "map" $have) }}
{{- include "kvbm-cxl.join" (dict "base" $have "more" $more) }}
{{- else if and (kindIs "slice" $more) (kindIs "slice" $have) }}
{{- $joined := list }}
{{- $names := dict }}
{{- if has $key (list "env" "containers" "initContainers") }}
{{- range $more }}{{ $_ := set $names .name . }}{{ end }}
{{- end }}
{{- range $have }}
{{- if not (and (kindIs "map" .) (hasKey $names (toString .name))) }}
{{- $joined = append $joined . }}
{{- else if ne $key "env" }}
{{- include "kvbm-cxl.join" (dict "base" . "more" (get $names .name)) }}
{{- $_ := unset $names .name }}
{{- $joined = append $joined . }}
{{- end }}
{{- end }}
{{- range $more }}
{{- if or (not (has $key (list "containers" "initContainers"))) (hasKey $names .name) }}{{ $joined = append $joined . }}{{ end }}
{{- end }}
{{- $_ := set $base $key $joined }}
{{- else }}
{{- $_ := set $base $key $more }}
{{- end }}
{{- end }}
{{- end }}

{{/* Parts that the chart adds to a pod of an engine, also to a user's pod: (dict "root" $ "role" "prefill" "container" "main"). Without the time-out
   vLLM kills its engine at once, which then leaves the pool to proof of its death. */}}
{{- define "kvbm-cxl.enginePart" -}}
{{- $root := .root }}
{{- $pool := include "kvbm-cxl.needsPool" $root }}
metadata:
  labels:
    {{- include "kvbm-cxl.podLabels" (merge (dict "part" "engine") .) | nindent 4 }}
  {{- if eq $root.Values.identity "role" }}
  annotations:
    # A new pod of the role cannot join before the old one on its node has left.
    nvidia.com/deployment-rolling-update-max-surge: "0"
    nvidia.com/deployment-rolling-update-max-unavailable: "1"
  {{- end }}
spec:
  {{- include "kvbm-cxl.poolPlacement" $root | nindent 2 }}
  {{- if and $pool (eq $root.Values.identity "node") }}
  hostPID: true
  {{- end }}
  {{- if and $pool (eq $root.Values.identity "role") }}
  affinity:
    podAntiAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        - topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "kvbm-cxl.selector" . | nindent 14 }}
  {{- end }}
  terminationGracePeriodSeconds: {{ $root.Values.gracePeriodSeconds }}
  securityContext:
    {{- include "kvbm-cxl.podSecurity" $root | nindent 4 }}
  {{- if $pool }}
  initContainers:
    {{- include "kvbm-cxl.stateInit" (merge (dict "image" $root.Values.images.worker) .) | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .container }}
      image: {{ include "kvbm-cxl.image" $root.Values.images.worker }}
      imagePullPolicy: {{ $root.Values.images.worker.pullPolicy }}
      args: [--shutdown-timeout, "30", --kv-transfer-config, {{ include "kvbm-cxl.transfer" $root | squote }}]
      {{- if $pool }}
      env:
        {{- include "kvbm-cxl.hostEnv" . | nindent 8 }}
        {{- if eq $root.Values.connector "nixl-cxl" }}
        - {name: NIXL_PLUGIN_DIR, value: /opt/kvbm-cxl/nixl-plugins}
        {{- end }}
      {{- end }}
      resources:
        {{- include "kvbm-cxl.resources" (dict "root" $root) | nindent 8 }}
      securityContext:
        {{- include "kvbm-cxl.poolSecurity" $root | nindent 8 }}
      {{- if $pool }}
      volumeMounts:
        - {name: cxl-state, mountPath: /run/kvbm-cxl}
        {{- include "kvbm-cxl.deviceMounts" $root | nindent 8 }}
      {{- end }}
  {{- if $pool }}
  volumes:
    {{- include "kvbm-cxl.stateVolume" . | nindent 4 }}
    {{- include "kvbm-cxl.deviceVolumes" $root | nindent 4 }}
  {{- end }}
{{- end }}

{{/* The engine of our own graphs and servers: (dict "root" $ "role" "prefill" "container" "main" "command" [...] "args" [...]). */}}
{{- define "kvbm-cxl.enginePod" -}}
{{- $root := .root }}
{{- $worker := index $root.Values .role }}
spec:
  containers:
    - name: {{ .container }}
      command: {{ .command | toJson }}
      args: {{ concat .args (list "--tensor-parallel-size" (toString $root.Values.model.tensorParallel) "--block-size" (toString $root.Values.model.blockTokens)) | toJson }}
      env:
        - {name: HF_HOME, value: /models}
        {{- with $root.Values.model.tokenSecret }}
        - name: HF_TOKEN
          valueFrom: {secretKeyRef: {name: {{ . }}, key: HF_TOKEN}}
        {{- end }}
      {{- if $worker.gpus }}
      resources: {limits: {nvidia.com/gpu: {{ $worker.gpus | quote }}}}
      {{- end }}
      volumeMounts:
        - {name: models, mountPath: /models}
  volumes:
    - name: models
      {{- if $root.Values.model.cacheClaim }}
      persistentVolumeClaim: {claimName: {{ $root.Values.model.cacheClaim }}}
      {{- else }}
      emptyDir: {}
      {{- end }}
{{- end }}

{{/* What the values of a role add to the container of its engine: (dict "worker" .Values.prefill "container" "main"). */}}
{{- define "kvbm-cxl.userPart" -}}
{{- $worker := .worker }}
spec:
  containers:
    - name: {{ .container }}
      {{- with $worker.args }}
      args: {{ toJson . }}
      {{- end }}
      {{- with $worker.env }}
      env: {{ toJson . }}
      {{- end }}
      {{- with $worker.resources }}
      resources: {{ toJson . }}
      {{- end }}
      {{- with $worker.volumeMounts }}
      volumeMounts: {{ toJson . }}
      {{- end }}
{{- end }}

{{/* The pod template of an engine as YAML: `pod` (a dict) with what the chart and the values of the role add:
   (dict "root" $ "role" "prefill" "container" "main" "pod" {...} "worker" .Values.prefill). */}}
{{- define "kvbm-cxl.withPool" -}}
{{- $pod := .pod }}
{{- include "kvbm-cxl.join" (dict "base" $pod "more" (include "kvbm-cxl.enginePart" . | fromYaml)) }}
{{- include "kvbm-cxl.join" (dict "base" $pod "more" (dict "spec" (.worker.pod | default dict))) }}
{{- include "kvbm-cxl.join" (dict "base" $pod "more" (include "kvbm-cxl.userPart" . | fromYaml)) }}
{{- toYaml $pod }}
{{- end }}
