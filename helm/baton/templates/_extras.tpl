{{- /* What operators add to pods: `pod` to all of them, `pod` of a role to its own. */}}

{{- /* Both as one, as JSON, without what is empty: lists follow each other, and of anything else the
role's wins. Takes (dict "root" $ "component" "..."). */}}
{{- define "baton.ownPod" -}}
{{- $own := dict -}}
{{- $role := dict -}}
{{- with get .root.Values (camelcase .component | untitle) -}}{{- $role = .pod | default dict -}}{{- end -}}
{{- range $key, $value := .root.Values.pod -}}
{{- $here := get $role $key -}}
{{- if kindIs "slice" $value -}}
{{- $value = concat $value ($here | default list) -}}
{{- else if kindIs "map" $value -}}
{{- $value = mergeOverwrite (deepCopy $value) ($here | default dict) -}}
{{- else -}}
{{- $value = $here | default $value -}}
{{- end -}}
{{- if $value -}}{{- $_ := set $own $key $value -}}{{- end -}}
{{- end -}}
{{- /* A Job ends with its containers, and a sidecar goes on. */ -}}
{{- if eq .component "download" -}}{{- $_ := unset $own "sidecars" -}}{{- end -}}
{{- toJson $own -}}
{{- end -}}

{{- /* A list as JSON in which an entry replaces an earlier one of the same key. Takes "key" and "list". */}}
{{- define "baton.lastOfKey" -}}
{{- $names := list -}}
{{- $entries := dict -}}
{{- $key := .key -}}
{{- range .list -}}
{{- $name := get . $key -}}
{{- $names = append $names $name | uniq -}}
{{- $_ := set $entries $name . -}}
{{- end -}}
{{- $list := list -}}
{{- range $names -}}{{- $list = append $list (get $entries .) -}}{{- end -}}
{{- toJson $list -}}
{{- end -}}

{{- /* A pod's spec with what is added. Takes (dict "root" $ "component" "..." "template" "..."), whose
template writes the spec of the chart, indented by six, from the root and "component". */}}
{{- define "baton.podSpec" -}}
{{- $spec := include .template (set (omit .root "component") "component" .component) -}}
{{- $own := include "baton.ownPod" . | fromJson -}}
{{- if $own -}}
{{- $pod := fromYaml $spec -}}
{{- $main := first $pod.containers -}}
{{- include "baton.extendContainer" (dict "container" $main "own" $own) -}}
{{- range $key, $name := dict "initContainers" "initContainers" "containers" "sidecars" -}}
{{- $list := get $pod $key | default list -}}
{{- range index $own $name -}}
{{- if eq .name $main.name -}}
{{- fail (printf "pod.%s: has a container %s, which is the name of the chart's; expected another one. Rename it" $name .name) -}}
{{- end -}}
{{- $security := include "baton.containerSecurity" $ | fromYaml -}}
{{- range $field, $value := .securityContext -}}{{- $_ := set $security $field $value -}}{{- end -}}
{{- $list = append $list (set . "securityContext" $security) -}}
{{- end -}}
{{- with $list -}}
{{- $_ := set $pod $key (include "baton.lastOfKey" (dict "key" "name" "list" .) | fromJsonArray) -}}
{{- end -}}
{{- end -}}
{{- with $own.volumes -}}
{{- $_ := set $pod "volumes" (include "baton.lastOfKey" (dict "key" "name" "list" (concat $pod.volumes .)) | fromJsonArray) -}}
{{- end -}}
{{- include "baton.extendScheduling" (merge (dict "pod" $pod "own" $own) .) -}}
{{- include "baton.limitFolders" (dict "pod" $pod "own" $own) -}}
{{- include "baton.checkMounts" (dict "pod" $pod "component" .component) -}}
{{- toYaml $pod | nindent 6 }}
{{ else -}}
{{- $spec -}}
{{- end -}}
{{- end -}}

{{- /* Changes "container" by "own". */}}
{{- define "baton.extendContainer" -}}
{{- $container := .container -}}
{{- range $name, $key := dict "env" "name" "volumeMounts" "mountPath" -}}
{{- with get $.own $name -}}
{{- $list := concat (get $container $name | default list) . -}}
{{- $_ := set $container $name (include "baton.lastOfKey" (dict "key" $key "list" $list) | fromJsonArray) -}}
{{- end -}}
{{- end -}}
{{- with .own.envFrom -}}{{- $_ := set $container "envFrom" . -}}{{- end -}}
{{- end -}}

{{- /* Changes "pod" by what "own" says of nodes, and of the account. Takes the component as well. */}}
{{- define "baton.extendScheduling" -}}
{{- $pod := .pod -}}
{{- range $field, $name := dict "priorityClassName" "priorityClassName" "schedulerName" "schedulerName" "serviceAccountName" "serviceAccount" -}}
{{- with get $.own $name -}}{{- $_ := set $pod $field . -}}{{- end -}}
{{- end -}}
{{- with .own.nodeSelector -}}{{- $_ := set $pod "nodeSelector" (merge (dict) ($pod.nodeSelector | default dict) .) -}}{{- end -}}
{{- with .own.tolerations -}}{{- $_ := set $pod "tolerations" (concat ($pod.tolerations | default list) .) -}}{{- end -}}
{{- with .own.affinity -}}
{{- $affinity := $pod.affinity | default dict -}}
{{- range $kind, $rules := . -}}{{- $_ := set $affinity $kind $rules -}}{{- end -}}
{{- $_ := set $pod "affinity" $affinity -}}
{{- end -}}
{{- with .own.topologySpreadConstraints -}}
{{- range . -}}
{{- if not .labelSelector -}}
{{- $_ := set . "labelSelector" (dict "matchLabels" (include "baton.selectorLabels" $ | fromYaml)) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $pod "topologySpreadConstraints" . -}}
{{- end -}}
{{- end -}}

{{- /* Changes the volumes "tmp" and "cache" of "pod", where they are folders of the node. */}}
{{- define "baton.limitFolders" -}}
{{- range .pod.volumes -}}
{{- $size := get $.own (printf "%sSize" .name) -}}
{{- if and (hasKey . "emptyDir") (has .name (list "tmp" "cache")) $size -}}
{{- $_ := set . "emptyDir" (dict "sizeLimit" $size) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* An API server refuses a pod that mounts a volume which it has not. */}}
{{- define "baton.checkMounts" -}}
{{- $volumes := list -}}
{{- range .pod.volumes -}}{{- $volumes = append $volumes .name -}}{{- end -}}
{{- range $container := concat .pod.containers (.pod.initContainers | default list) -}}
{{- range $container.volumeMounts -}}
{{- if not (has .name $volumes) -}}
{{- fail (printf "pod.volumeMounts: names the volume %s, which the pods of %s do not have; expected one of %s. Add it to pod.volumes" .name $.component (join ", " $volumes)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
