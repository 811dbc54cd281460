{{- /* Values in the form that something else wants, and what a schema cannot say of them. */}}

{{- /* Bytes of a quantity such as 512Mi. */}}
{{- define "baton.bytes" -}}
{{- $units := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $number := regexFind "^[0-9.]+" (toString .) -}}
{{- mulf (float64 $number) (get $units (trimPrefix $number (toString .))) | int64 -}}
{{- end -}}

{{- /* A quantity such as 500m, 2 or 512Mi as a number of units or bytes, to compare. */}}
{{- define "baton.quantity" -}}
{{- $text := toString . -}}
{{- if hasSuffix "m" $text -}}
{{- divf (trimSuffix "m" $text | float64) 1000 -}}
{{- else if regexMatch "[A-Za-z]$" $text -}}
{{- include "baton.bytes" $text -}}
{{- else -}}
{{- $text -}}
{{- end -}}
{{- end -}}

{{- /* A number without an exponent, anything else as it is. */}}
{{- define "baton.plain" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) -}}{{ int64 . }}{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{- /* Where Redis is. The password is not in the URL: processes are given it as it is. */}}
{{- define "baton.redisUrl" -}}
{{- if .Values.redis.url -}}
{{- .Values.redis.url | replace ":$(REDIS_PASSWORD)@" "@" | replace "//@" "//" -}}
{{- else -}}
redis://{{ include "baton.name" (dict "root" . "component" "redis") }}:6379/0
{{- end -}}
{{- end -}}

{{- /* Variables by which a process or a command finds Redis; takes the root. */}}
{{- define "baton.redisEnv" -}}
{{- $redis := .Values.redis -}}
{{- $url := include "baton.redisUrl" . -}}
{{- if $redis.existingSecret -}}
{{- if contains "$(REDIS_PASSWORD)" $url -}}
- name: REDIS_PASSWORD
  valueFrom: { secretKeyRef: { name: {{ $redis.existingSecret }}, key: password } }
{{ end -}}
{{- if or (not $redis.url) (contains ":$(REDIS_PASSWORD)@" $redis.url) -}}
- name: BATON_REDIS_PASSWORD
  valueFrom: { secretKeyRef: { name: {{ $redis.existingSecret }}, key: password } }
{{ end -}}
{{- end -}}
- name: BATON_REDIS_URL
  value: {{ $url | quote }}
{{- end -}}

{{- /* The ports by name that a process listens on, as JSON; takes the component. */}}
{{- define "baton.ports" -}}
{{- $ports := .root.Values.ports -}}
{{- $here := dict "grpc" $ports.grpc "metrics" $ports.metrics "admin" $ports.admin -}}
{{- if eq .component "endpoint-picker" -}}
{{- $_ := unset $here "admin" -}}
{{- else if ne .component "router" -}}
{{- $_ := set $here "kv" $ports.kv -}}
{{- else if .root.Values.router.http -}}
{{- $_ := set $here "http" $ports.http -}}
{{- end -}}
{{- toJson $here -}}
{{- end -}}

{{- define "baton.checkImages" -}}
{{- $image := .Values.image -}}
{{- if not (or $image.registry (eq $image.pullPolicy "Never") (and $image.router.repository $image.worker.repository)) -}}
{{- fail "image.registry: is empty; expected the registry that has baton-router and baton-worker, such as ghcr.io/example. Set it, or image.pullPolicy: Never where the images are loaded into the nodes" -}}
{{- end -}}
{{- end -}}

{{- /* What a schema cannot say of network policies: one number by another. */}}
{{- define "baton.checkNetworks" -}}
{{- $policy := .Values.networkPolicy -}}
{{- $peers := dict "clients" $policy.clients "scrapers" $policy.scrapers "dns" $policy.dns -}}
{{- range $number, $rule := $policy.egress -}}
{{- $_ := set $peers (printf "egress[%d].to" $number) ($rule.to | default list) -}}
{{- range $rule.ports -}}
{{- if and .endPort (lt (.endPort | int) (.port | int)) -}}
{{- fail (printf "networkPolicy.egress[%d].ports: endPort is %v; expected no less than port, %v" $number .endPort .port) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name, $list := $peers -}}
{{- range $list -}}
{{- with .ipBlock -}}
{{- $cidr := .cidr -}}
{{- range .except -}}
{{- if ne (include "baton.isWithin" (dict "inner" . "outer" $cidr)) "true" -}}
{{- fail (printf "networkPolicy.%s: except has %s; expected a part of %s" $name . $cidr) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Whether the network "inner" is a part of "outer"; of IPv6 the lengths alone are compared. */}}
{{- define "baton.isWithin" -}}
{{- $inner := splitList "/" .inner -}}
{{- $outer := splitList "/" .outer -}}
{{- $length := index $outer 1 | int -}}
{{- $isIPv6 := contains ":" .outer -}}
{{- if or (ne (contains ":" .inner) $isIPv6) (le (index $inner 1 | int) $length) -}}
false
{{- else if $isIPv6 -}}
true
{{- else -}}
{{- eq (include "baton.networkBits" (list (index $inner 0) $length)) (include "baton.networkBits" (list (index $outer 0) $length)) -}}
{{- end -}}
{{- end -}}

{{- /* The first bits of an IPv4 address as a number; takes the address and how many. */}}
{{- define "baton.networkBits" -}}
{{- $number := 0 -}}
{{- range splitList "." (index . 0) -}}{{- $number = add (mul $number 256) (int .) -}}{{- end -}}
{{- range until (sub 32 (index . 1) | int) -}}{{- $number = div $number 2 -}}{{- end -}}
{{- $number -}}
{{- end -}}

{{- define "baton.checkPorts" -}}
{{- $taken := dict -}}
{{- range $name := list "grpc" "http" "metrics" "kv" "admin" -}}
{{- $port := get $.Values.ports $name | int64 | toString -}}
{{- with get $taken $port -}}
{{- fail (printf "ports.%s: %s is ports.%s already; each needs a port of its own" $name $port .) -}}
{{- end -}}
{{- $_ := set $taken $port $name -}}
{{- end -}}
{{- end -}}

{{- define "baton.checkRedis" -}}
{{- $password := regexFind "//[^@/]*:[^@]*@" .Values.redis.url -}}
{{- if and $password (not (contains ":$(REDIS_PASSWORD)@" $password)) -}}
{{- fail "redis.url: has a password in it; write $(REDIS_PASSWORD) there, and the name of a secret in redis.existingSecret" -}}
{{- end -}}
{{- if and (contains "$(REDIS_PASSWORD)" .Values.redis.url) (not .Values.redis.existingSecret) -}}
{{- fail "redis.existingSecret: is needed for $(REDIS_PASSWORD) in redis.url" -}}
{{- end -}}
{{- end -}}

{{- define "baton.checkWorker" -}}
{{- $worker := get .root.Values .component -}}
{{- $kv := .root.Values.kv -}}
{{- if lt ($worker.drainSeconds | int64) ($kv.leaseSeconds | int64) -}}
{{- fail (printf "%s.drainSeconds: %v would end a worker that still keeps blocks for another one; it must be no less than kv.leaseSeconds (%v)" .component $worker.drainSeconds $kv.leaseSeconds) -}}
{{- end -}}
{{- include "baton.checkMemory" . -}}
{{- if and $worker.autoscaling.enabled (gt ($worker.drainSeconds | int64) 1800) -}}
{{- fail (printf "%s.drainSeconds: is %v; expected at most 1800 with %s.autoscaling, whose HorizontalPodAutoscaler removes one pod per drain and may wait no longer. Lower it, or set replicas by hand" .component $worker.drainSeconds .component) -}}
{{- end -}}
{{- include "baton.checkResources" (dict "name" .component "resources" $worker.resources) -}}
{{- if and (regexMatch "^0+%?$" (toString $worker.rollout.maxSurge)) (regexMatch "^0+%?$" (toString $worker.rollout.maxUnavailable)) -}}
{{- fail (printf "%s.rollout.maxSurge: is 0, and so is maxUnavailable; expected one of them above 0, or an upgrade could neither add nor remove a pod. Set maxUnavailable: 1 where there is no spare GPU" .component) -}}
{{- end -}}
{{- if and $worker.autoscaling.enabled (not .root.Values.autoscaling.prometheus) -}}
{{- fail (printf "autoscaling.prometheus: is needed for %s.autoscaling" .component) -}}
{{- end -}}
{{- include "baton.checkDevices" . -}}
{{- include "baton.checkReplicas" (dict "name" .component "autoscaling" $worker.autoscaling) -}}
{{- end -}}

{{- define "baton.checkReplicas" -}}
{{- if lt (.autoscaling.maxReplicas | int64) (.autoscaling.minReplicas | int64) -}}
{{- fail (printf "%s.autoscaling.maxReplicas: is less than minReplicas" .name) -}}
{{- end -}}
{{- end -}}

{{- /* Takes "name" and "resources". */}}
{{- define "baton.checkResources" -}}
{{- $limits := .resources.limits | default dict -}}
{{- $name := .name -}}
{{- range $resource, $request := .resources.requests -}}
{{- $limit := get $limits $resource -}}
{{- if and (regexMatch "/|^hugepages-" $resource) (ne (toString $request) (toString $limit)) -}}
{{- fail (printf "%s.resources.requests.%s: is %v; expected the limit, %v, since devices and huge pages are not shared. Set both alike" $name $resource $request (default "none" $limit)) -}}
{{- end -}}
{{- if and $limit (lt (include "baton.quantity" $limit | float64) (include "baton.quantity" $request | float64)) -}}
{{- fail (printf "%s.resources.limits.%s: is %v; expected no less than the request, %v. Raise the limit or lower the request" $name $resource $limit $request) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Labels by which the chart's selectors and Kubernetes' controllers find pods. */}}
{{- define "baton.checkPodLabels" -}}
{{- range $key := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" "pod-template-hash" "controller-revision-hash" "statefulset.kubernetes.io/pod-name" "apps.kubernetes.io/pod-index" -}}
{{- if hasKey $.Values.podLabels $key -}}
{{- fail (printf "podLabels: has %s, by which pods are found; expected labels of your own. Name it differently" $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "baton.checkSockets" -}}
{{- $directory := .Values.kv.socketDirectory -}}
{{- if and $directory.claim $directory.hostPath -}}
{{- fail "kv.socketDirectory: is a claim or a hostPath, not both" -}}
{{- end -}}
{{- if and (eq .Values.kv.connector "shm") (not (or $directory.claim $directory.hostPath)) -}}
{{- fail "kv.socketDirectory: is needed for kv.connector: shm; pods find each other's memory there" -}}
{{- end -}}
{{- end -}}
