{{/* SPDX-License-Identifier: Apache-2.0 */}}
{{/* What the templates have in common. Those that need a role take (dict "root" $ "role" "prefill"). */}}

{{- define "kvbm-cxl.name" -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{- end }}

{{- define "kvbm-cxl.labels" -}}
app.kubernetes.io/name: kvbm-cxl
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end }}

{{/* What pods are chosen by: labels that never change in the life of a release. */}}
{{- define "kvbm-cxl.selector" -}}
app.kubernetes.io/name: kvbm-cxl
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "kvbm-cxl.needsPool" -}}{{ if ne .Values.connector "nixl-ucx" }}true{{ end }}{{- end }}

{{- define "kvbm-cxl.image" -}}{{ printf "%s:%s" .repository .tag }}{{- end }}

{{/* The identity of a host of the pool: it stays when the pod goes, and no other node or role has it. */}}
{{- define "kvbm-cxl.machine" -}}
$(NODE_NAME)/{{ .root.Release.Name }}/{{ if eq .root.Values.identity "node" }}node{{ else }}{{ .role }}{{ end }}
{{- end }}

{{- define "kvbm-cxl.stateFolder" -}}
/run/kvbm-cxl/{{ .root.Release.Name }}-{{ if eq .root.Values.identity "node" }}node{{ else }}{{ .role }}{{ end }}
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
- {name: device-{{ $number }}, mountPath: {{ $device }}}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvbm-cxl.deviceVolumes" -}}
{{- if eq .Values.pool.access "host-path" }}
{{- range $number, $device := compact (append .Values.pool.devices .Values.pool.metadata) }}
- name: device-{{ $number }}
  hostPath: {path: {{ $device }}, type: CharDevice}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvbm-cxl.stateVolume" -}}
- name: state
  hostPath: {path: {{ include "kvbm-cxl.stateFolder" . }}, type: DirectoryOrCreate}
{{- end }}

{{/* The kubelet makes the folder as root's. Root without any other right gives it to the user of the pool, once. */}}
{{- define "kvbm-cxl.stateInit" -}}
- name: state
  image: {{ include "kvbm-cxl.image" .root.Values.images.tools }}
  imagePullPolicy: {{ .root.Values.images.tools.pullPolicy }}
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
    - {name: state, mountPath: /run/kvbm-cxl}
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
  - {name: pool, resourceClaimTemplateName: {{ include "kvbm-cxl.name" . }}-pool}
{{- end }}
{{- end }}

{{- define "kvbm-cxl.transfer" -}}
{{- if eq .Values.connector "cxl" -}}
{"kv_connector": "CxlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
{{- else -}}
{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"backends": [{{ ternary "CXL" "UCX" (eq .Values.connector "nixl-cxl") | quote }}]}}
{{- end }}
{{- end }}

{{/* Arguments that every engine has. Without the time-out vLLM kills its engine at once, which then leaves the pool to proof of its death. */}}
{{- define "kvbm-cxl.engineArgs" -}}
- --tensor-parallel-size
- {{ .Values.model.tensorParallel | quote }}
- --block-size
- {{ .Values.model.blockTokens | quote }}
- --shutdown-timeout
- "30"
- --kv-transfer-config
- {{ include "kvbm-cxl.transfer" . | squote }}
{{- end }}

{{/* The pod of an engine, in Dynamo's graph or alone: (dict "root" $ "role" "prefill" "command" [...] "args" "..." "container" "main" "ports" "..."). */}}
{{- define "kvbm-cxl.enginePod" -}}
{{- $root := .root }}
{{- $worker := index $root.Values .role }}
{{- $pool := include "kvbm-cxl.needsPool" $root }}
metadata:
  labels:
    {{- include "kvbm-cxl.labels" . | nindent 4 }}
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
    {{- include "kvbm-cxl.stateInit" . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .container }}
      image: {{ include "kvbm-cxl.image" $root.Values.images.worker }}
      imagePullPolicy: {{ $root.Values.images.worker.pullPolicy }}
      command: {{ .command | toJson }}
      args:
        {{- .args | nindent 8 }}
        {{- include "kvbm-cxl.engineArgs" $root | nindent 8 }}
        {{- range $worker.args }}
        - {{ . | quote }}
        {{- end }}
      env:
        {{- if $pool }}
        {{- include "kvbm-cxl.hostEnv" . | nindent 8 }}
        {{- end }}
        {{- if eq $root.Values.connector "nixl-cxl" }}
        - {name: NIXL_PLUGIN_DIR, value: /opt/kvbm-cxl/nixl-plugins}
        {{- end }}
        - {name: HF_HOME, value: /models}
        {{- with $root.Values.model.tokenSecret }}
        - name: HF_TOKEN
          valueFrom: {secretKeyRef: {name: {{ . }}, key: HF_TOKEN}}
        {{- end }}
        {{- with $worker.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with .ports }}
      {{- . | nindent 6 }}
      {{- end }}
      resources:
        {{- include "kvbm-cxl.resources" (dict "root" $root "resources" $worker.resources "gpus" $worker.gpus) | nindent 8 }}
      securityContext:
        {{- include "kvbm-cxl.poolSecurity" $root | nindent 8 }}
      volumeMounts:
        - {name: models, mountPath: /models}
        {{- if .sharedMemory }}
        - {name: shared-memory, mountPath: /dev/shm}
        {{- end }}
        {{- if $pool }}
        - {name: state, mountPath: /run/kvbm-cxl}
        {{- include "kvbm-cxl.deviceMounts" $root | nindent 8 }}
        {{- end }}
  volumes:
    - name: models
      {{- if $root.Values.model.cacheClaim }}
      persistentVolumeClaim: {claimName: {{ $root.Values.model.cacheClaim }}}
      {{- else }}
      emptyDir: {}
      {{- end }}
    {{- if .sharedMemory }}
    - name: shared-memory
      emptyDir: {medium: Memory, sizeLimit: {{ .sharedMemory }}}
    {{- end }}
    {{- if $pool }}
    {{- include "kvbm-cxl.stateVolume" . | nindent 4 }}
    {{- include "kvbm-cxl.deviceVolumes" $root | nindent 4 }}
    {{- end }}
{{- end }}
