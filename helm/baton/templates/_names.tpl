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

{{- /* Roles of the worker pools that are deployed; takes the root. */}}
{{- define "baton.roles" -}}
{{- with .Values.encode -}}
{{- if or .autoscaling.enabled .replicas }}encode {{ end -}}
{{- end -}}
prefill decode
{{- end -}}

{{- /* Pods of a Deployment, empty where the field is to be absent; takes "pool", its values, as well. An
autoscaler's number stays: without the field, Kubernetes would scale to one pod as soon as autoscaling
is turned on. `helm template` finds no Deployment, and names no number: tools that apply its output again
and again would undo the autoscaler's. */}}
{{- define "baton.replicas" -}}
{{- if not .pool.autoscaling.enabled -}}
{{- .pool.replicas -}}
{{- else -}}
{{- with lookup "apps/v1" "Deployment" .root.Release.Namespace (include "baton.name" .) -}}
{{- /* At 0 an autoscaler is off. */ -}}
{{- .spec.replicas | int | default ($.pool.autoscaling.minReplicas | int) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Routers that serve this release's workers, perhaps those of another release. Both take the root. */}}
{{- define "baton.routers" -}}
{{- $root := . -}}
{{- with .Values.router.release -}}
{{- $root = dict "Release" (dict "Name" .) "Values" (dict "fullnameOverride" "") -}}
{{- end -}}
{{- include "baton.name" (dict "root" $root "component" "router") -}}
{{- end -}}

{{- define "baton.routerLabels" -}}
{{- $release := dict "Name" (.Values.router.release | default .Release.Name) -}}
{{- include "baton.selectorLabels" (dict "root" (dict "Release" $release) "component" "router") -}}
{{- end -}}

{{- /* Seconds within which every worker must be ready; takes the root. */}}
{{- define "baton.workerStartupSeconds" -}}
{{- $seconds := 0 -}}
{{- range $role := include "baton.roles" . | splitList " " -}}
{{- $seconds = max $seconds (get $.Values $role).startupSeconds -}}
{{- end -}}
{{- add $seconds (include "baton.downloadSeconds" .) -}}
{{- end -}}

{{- /* Components of the cluster that are deployed; takes the root. */}}
{{- define "baton.components" -}}
router {{ include "baton.roles" . }}
{{- end -}}

{{- define "baton.image" -}}
{{- $image := .root.Values.image -}}
{{- $own := get $image .image -}}
{{- if $own.repository -}}
{{- $own.repository -}}
{{- else -}}
{{- with $image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
baton-{{ .image }}
{{- end -}}
{{- if $own.digest }}@{{ $own.digest }}{{ else }}:{{ $image.tag | default .root.Chart.AppVersion }}{{ end }}
{{- end -}}


{{- /* Paths for clients beside /v1, which match exactly. */}}
{{- define "baton.httpPaths" -}}
/tokenize /detokenize /rerank /v2/rerank /version /ping /openapi.json
{{- end -}}
