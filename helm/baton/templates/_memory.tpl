{{- /* Memory of workers: what their limits have to hold. All take "root" and "component". */}}

{{- /* Fails if the limit cannot hold what is known of a worker's memory. */}}
{{- define "baton.checkMemory" -}}
{{- $worker := get .root.Values .component -}}
{{- with dig "limits" "memory" "" $worker.resources -}}
{{- $weights := include "baton.weightsBytes" $ | int64 -}}
{{- $pool := ternary "0" $worker.kvCacheSize (gt ($worker.gpus | int) 0) -}}
{{- $swap := include "baton.plain" ($worker.settings.swap_bytes | default 0) | int64 -}}
{{- $shared := $worker.sharedMemory | default "0" -}}
{{- $needed := add $weights (include "baton.bytes" $pool) $swap (include "baton.bytes" $shared) 1073741824 -}}
{{- if lt (include "baton.bytes" . | int64) $needed -}}
{{- $held := ternary (list) (list (printf "kvCacheSize (%s of shared memory)" $pool)) (gt ($worker.gpus | int) 0) -}}
{{- if $swap -}}{{- $held = append $held (printf "settings.swap_bytes (%s)" (include "baton.gibibytes" $swap)) -}}{{- end -}}
{{- if $worker.sharedMemory -}}{{- $held = append $held "sharedMemory" -}}{{- end -}}
{{- $remedy := ternary "Raise it" "Raise it; the weights come on top" (gt ($worker.gpus | int) 0) -}}
{{- if $weights -}}
{{- $held = prepend $held (printf "the weights of %s (%s)" $.root.Values.model.name (include "baton.gibibytes" $weights)) -}}
{{- $remedy = "Raise it, or set model.weightsSize if the weights take less" -}}
{{- end -}}
{{- $beside := ternary "" (printf "%s and " (join ", " $held)) (empty $held) -}}
{{- fail (printf "%s.resources.limits.memory: %s does not hold %s1Gi of its process; expected %s at least. %s" $.component . $beside (include "baton.gibibytes" $needed) $remedy) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Memory that the weights take at least, in bytes: as model.weightsSize says, else as the name of
a hub's model does, less a tenth, since names round; 0 where neither tells. A GPU's worker maps the
files of plain weights, which takes none; quantized ones it unpacks in memory first. */}}
{{- define "baton.weightsBytes" -}}
{{- $model := .root.Values.model -}}
{{- $worker := get .root.Values .component -}}
{{- $name := base $model.name -}}
{{- $isQuantized := regexMatch "(?i)awq|gptq|gguf|bnb|quant|fp[48]|int[48]|[48]-?bits?|w[48]a" $name -}}
{{- $parameters := regexFind "(?i)-[0-9.]+[bm](-|$)" $name | trimAll "-" | lower -}}
{{- if or $worker.settings.encoder_only (and $worker.gpus (not $isQuantized)) -}}
0
{{- else if $model.weightsSize -}}
{{- include "baton.bytes" $model.weightsSize -}}
{{- else if and (eq $model.source "hub") $parameters -}}
{{- $number := trimSuffix "b" $parameters | trimSuffix "m" | float64 -}}
{{- $each := ternary 4.0 2.0 (eq $model.dtype "float32") -}}
{{- if not $worker.gpus -}}
{{- $each = get (dict "int8" 1.0 "int4" 0.5) ($worker.settings.quantization | default "none") | default (ternary 0.5 $each $isQuantized) -}}
{{- end -}}
{{- mulf $number (ternary 1e9 1e6 (hasSuffix "b" $parameters)) $each 0.9 | int64 -}}
{{- else -}}
0
{{- end -}}
{{- end -}}

{{- /* A number of bytes for people, rounded up. */}}
{{- define "baton.gibibytes" -}}
{{- printf "%.1fGi" (divf (mulf (divf . 1073741824) 10 | ceil) 10) -}}
{{- end -}}
