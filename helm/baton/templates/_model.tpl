{{- /* Where the checkpoint comes from: the same for routers, which read its tokenizer and
configuration, and for workers. All take the root. */}}

{{- define "baton.modelPath" -}}
{{- $model := .Values.model -}}
{{- if has $model.source (list "claim" "image") -}}
/models{{ with $model.name }}/{{ . }}{{ end }}
{{- else -}}
{{- $model.name -}}
{{- end -}}
{{- end -}}

{{- /* The name under which the model is served: as its checkpoint's last part, unless it is given. */}}
{{- define "baton.servedName" -}}
{{- .Values.model.servedName | default (base (include "baton.modelPath" .)) -}}
{{- end -}}

{{- /* The models of a process, the release's own first; takes a component. */}}
{{- define "baton.models" -}}
{{- $own := printf "%s=%s" (include "baton.servedName" .root) (include "baton.modelPath" .root) -}}
{{- $models := list (ternary $own (include "baton.modelPath" .root) (ne .root.Values.model.servedName "")) -}}
{{- if eq .component "router" -}}
{{- range .root.Values.router.models -}}
{{- $models = append $models (printf "%s=%s" .name .checkpoint) -}}
{{- end -}}
{{- end -}}
{{- join "," $models -}}
{{- end -}}

{{- define "baton.modelEnv" -}}
{{- $model := .Values.model }}
- name: HOME
  value: /tmp
- name: HF_HOME
  value: /cache/huggingface
- name: TRITON_CACHE_DIR
  value: /cache/triton
{{- if ne $model.source "hub" }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- else if $model.hubSecret }}
- name: HF_TOKEN
  valueFrom: { secretKeyRef: { name: {{ $model.hubSecret }}, key: token } }
{{- end }}
{{- end -}}

{{- define "baton.modelMounts" -}}
- { name: tmp, mountPath: /tmp }
- { name: cache, mountPath: /cache }
{{- if has .Values.model.source (list "claim" "image") }}
- { name: model, mountPath: /models, readOnly: true }
{{- end }}
{{- end -}}

{{- define "baton.modelVolumes" -}}
{{- $model := .Values.model -}}
- name: tmp
  emptyDir: {}
- name: cache
  {{- if and (eq $model.source "hub") $model.cacheClaim }}
  persistentVolumeClaim: { claimName: {{ $model.cacheClaim }} }
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- if eq $model.source "claim" }}
- name: model
  persistentVolumeClaim: { claimName: {{ $model.claim }}, readOnly: true }
{{- else if eq $model.source "image" }}
- name: model
  image: { reference: {{ $model.image | quote }}, pullPolicy: {{ .Values.image.pullPolicy }} }
{{- end }}
{{- end -}}
