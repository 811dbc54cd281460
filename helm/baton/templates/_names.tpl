{{- /* Names and labels. Those of one component take (dict "root" $ "component" "router"). */}}

{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains "baton" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-baton" (.Release.Name | trunc 34 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "baton.name" -}}
{{- printf "%s-%s" (include "baton.fullname" .root) .component -}}
{{- end -}}

{{- define "baton.selectorLabels" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "baton.labels" -}}
{{ include "baton.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "baton.metadata" -}}
name: {{ include "baton.name" . }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "baton.labels" . | nindent 2 }}
{{- end -}}

{{- define "baton.image" -}}
{{- $image := .root.Values.image -}}
{{- with $image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
baton-{{ .image }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end -}}


{{- /* Paths for clients beside /v1, which match exactly. */}}
{{- define "baton.httpPaths" -}}
/tokenize /detokenize /version /ping /openapi.json
{{- end -}}
