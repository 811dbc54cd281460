{{- /* What the pods of all processes have in common. All take (dict "root" $ "component" "..."). */}}

{{- define "baton.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "baton.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "baton.podMetadata" -}}
labels:
  {{- include "baton.selectorLabels" . | nindent 2 }}
  {{- with .root.Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (.annotations | default dict) .root.Values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Takes "drainSeconds" and "preStopSeconds" as well. */}}
{{- define "baton.podBasics" -}}
serviceAccountName: {{ include "baton.name" . }}
automountServiceAccountToken: false
# Kubernetes would tell of a Service called "baton" by BATON_PORT, which is a setting of ours.
enableServiceLinks: false
# preStop, the drain, and what is left: last answers on their way, leaving Redis, spans.
terminationGracePeriodSeconds: {{ add .preStopSeconds .drainSeconds 15 }}
securityContext:
  {{- include "baton.podSecurity" . | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{- /* Pods of one component apart from each other: over zones, and over nodes. */}}
{{- define "baton.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: topology.kubernetes.io/zone
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "baton.selectorLabels" . | nindent 8 }}
    matchLabelKeys: [pod-template-hash]
{{- end -}}

{{- define "baton.apart" -}}
podAntiAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 50
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- include "baton.selectorLabels" . | nindent 12 }}
{{- end -}}

{{- /* Variables of every process; takes "settings" and "drainSeconds" as well. */}}
{{- define "baton.env" -}}
{{- $values := .root.Values -}}
- name: POD_IP
  valueFrom: { fieldRef: { fieldPath: status.podIP } }
- name: POD_NAME
  valueFrom: { fieldRef: { fieldPath: metadata.name } }
{{- if ne .component "endpoint-picker" }}
{{ include "baton.redisEnv" .root }}
{{- if $values.redis.signingSecret }}
- name: BATON_REDIS_SIGNING_KEY_FILE
  value: /etc/baton/redis-signing/keys
{{- end }}
{{- end }}
- name: BATON_HOST
  value: "::" # any, of IPv6 and of IPv4
{{- include "baton.tlsEnv" . }}
- name: BATON_ADVERTISE_HOST
  value: $(POD_IP)
- name: BATON_PORT
  value: {{ $values.ports.grpc | quote }}
- name: BATON_ADMIN_PORT
  value: {{ $values.ports.admin | quote }}
- name: BATON_METRICS_PORT
  value: {{ $values.ports.metrics | quote }}
- name: BATON_MODEL
  value: {{ include "baton.models" . | quote }}
- name: BATON_DRAIN_TIMEOUT_S
  value: {{ .drainSeconds | quote }}
- name: BATON_LOG_LEVEL
  value: {{ $values.logs.level }}
- name: BATON_LOG_FORMAT
  value: {{ $values.logs.format }}
{{- range $name, $value := .settings }}
- name: BATON_{{ upper $name }}
  value: {{ include "baton.plain" $value | quote }}
{{- end }}
{{- include "baton.modelEnv" .root }}
{{- with $values.tracing }}
{{- if .endpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ .endpoint | quote }}
- name: OTEL_TRACES_SAMPLER
  value: parentbased_traceidratio
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ .sampleRatio | quote }}
- name: OTEL_RESOURCE_ATTRIBUTES
  value: k8s.namespace.name={{ $.root.Release.Namespace }},k8s.pod.name=$(POD_NAME)
{{- with .headersSecret }}
- name: OTEL_EXPORTER_OTLP_HEADERS
  valueFrom: { secretKeyRef: { name: {{ . }}, key: headers } }
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "baton.containerPorts" -}}
{{- range $name, $port := include "baton.ports" . | fromJson }}
- name: {{ $name }}
  containerPort: {{ $port }}
{{- end }}
{{- end -}}

{{- /* A health check; takes (dict "root" $ "service" "..."). The kubelet speaks gRPC in the clear
alone, so over TLS it asks beside the metrics, which are plain HTTP. */}}
{{- define "baton.health" -}}
{{- if .root.Values.tls.enabled -}}
httpGet:
  port: metrics
  path: {{ ternary "/livez" "/readyz" (eq .service "liveness") }}
{{- else -}}
grpc:
  port: {{ .root.Values.ports.grpc }}
  service: {{ .service }}
{{- end -}}
{{- end -}}

{{- /* Liveness and readiness, alike for all; while a start-up probe fails neither is looked at. */}}
{{- define "baton.probes" -}}
livenessProbe:
  {{- include "baton.health" (dict "root" .root "service" "liveness") | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  {{- include "baton.health" (dict "root" .root "service" "readiness") | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
{{- end -}}

{{- /* The keys of signatures in Redis; a folder, so that a changed secret arrives. */}}
{{- define "baton.signingMounts" -}}
{{- if .Values.redis.signingSecret }}
- { name: redis-signing, mountPath: /etc/baton/redis-signing, readOnly: true }
{{- end }}
{{- end -}}

{{- define "baton.signingVolumes" -}}
{{- with .Values.redis.signingSecret }}
- name: redis-signing
  secret: { secretName: {{ . }} }
{{- end }}
{{- end -}}
