{{- /* Where the checkpoint comes from: the same for routers, which read its tokenizer and
configuration, and for workers. All take the root. */}}

{{- define "baton.modelPath" -}}
{{- $model := .Values.model -}}
{{- if has $model.source (list "claim" "image") -}}
/models{{ with $model.name }}/{{ . }}{{ end }}
{{- else -}}
{{- $model.name -}}{{- with $model.revision }}@{{ . }}{{ end -}}
{{- end -}}
{{- end -}}

{{- /* The name under which the model is served: as its checkpoint's last part, unless it is given. */}}
{{- define "baton.servedName" -}}
{{- .Values.model.servedName | default (base (include "baton.modelPath" . | trimSuffix (printf "@%s" .Values.model.revision))) -}}
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
- name: XDG_CACHE_HOME
  value: /cache
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

{{- /* Settings of workers that follow from their cache folder: in one of the pod's own, a file of
packed weights would be for no other worker. */}}
{{- define "baton.cacheSettings" -}}
{{- if not (and (eq .Values.model.source "hub") (include "baton.cacheClaim" .)) -}}
packed_weights_bytes: 0
{{- end -}}
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
  {{- $claim := include "baton.cacheClaim" . }}
  {{- if and (eq $model.source "hub") $claim }}
  persistentVolumeClaim: { claimName: {{ $claim }} }
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

{{- /* The claim that keeps what was downloaded, if there is one. */}}
{{- define "baton.cacheClaim" -}}
{{- $model := .Values.model -}}
{{- $model.cacheClaim | default (ternary (printf "%s-models" (include "baton.fullname" .)) "" (ne $model.cache.size "")) -}}
{{- end -}}

{{- define "baton.checkModel" -}}
{{- $model := .Values.model -}}
{{- if and $model.cacheClaim $model.cache.size -}}
{{- fail "model.cache.size: is set, and so is model.cacheClaim; expected one of them. Remove the claim of yours, or the size" -}}
{{- end -}}
{{- if and $model.download.enabled (not (include "baton.cacheClaim" .)) -}}
{{- fail "model.download.enabled: is true without a claim to download into; expected model.cache.size or model.cacheClaim. Set one" -}}
{{- end -}}
{{- include "baton.checkResources" (dict "name" "model.download" "resources" $model.download.resources) -}}
{{- end -}}

{{- /* A file that says that the model is there; one for each revision. */}}
{{- define "baton.downloadedFile" -}}
/cache/.downloaded/{{ include "baton.modelPath" . | sha256sum | trunc 16 }}
{{- end -}}

{{- /* Seconds that pods may wait for the model. */}}
{{- define "baton.downloadSeconds" -}}
{{- with .Values.model.download }}{{ ternary .timeoutSeconds 0 .enabled }}{{ end -}}
{{- end -}}

{{- /* Has a pod wait until the model is there. Takes "root", "image", and the "resources" of the pod's
container, which cost nothing twice. */}}
{{- define "baton.awaitModel" -}}
{{- if .root.Values.model.download.enabled -}}
initContainers:
  - name: model
    image: {{ include "baton.image" . }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    args: [sh, -euc, 'until [ -e "$0" ]; do sleep 2; done', {{ include "baton.downloadedFile" .root }}]
    resources:
      {{- toYaml .resources | nindent 6 }}
    securityContext:
      {{- include "baton.containerSecurity" . | nindent 6 }}
    volumeMounts:
      - { name: cache, mountPath: /cache, readOnly: true }
{{- end }}
{{- end -}}
