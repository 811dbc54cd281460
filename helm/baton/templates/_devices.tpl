{{- /* What GPUs and RDMA need of a pod beyond resources. All take the values of one worker role. */}}

{{- define "baton.devicePod" -}}
{{- with .runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- if .hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- if .hostIPC }}
hostIPC: true
{{- end }}
{{- end -}}

{{- /* Networks of Multus, and the memory that may be locked: Kubernetes has no ulimits, so a plugin of
the container runtime (NRI ulimit-adjuster) sets it. */}}
{{- define "baton.deviceAnnotations" -}}
{{- with .networks }}
k8s.v1.cni.cncf.io/networks: {{ join "," . | quote }}
{{- end }}
{{- with .memlock }}
{{- $bytes := ternary "18446744073709551615" (include "baton.bytes" .) (eq . "unlimited") }}
ulimits.nri.containerd.io/container.worker: |
  - type: RLIMIT_MEMLOCK
    soft: {{ $bytes }}
    hard: {{ $bytes }}
{{- end }}
{{- end -}}

{{- /* What a device claim asks for, as a ResourceClaimTemplate's spec; takes one of `deviceClaims`. */}}
{{- define "baton.claimSpec" -}}
spec:
  devices:
    requests:
      - name: device
        exactly:
          deviceClassName: {{ .deviceClassName }}
          {{- with .count }}
          count: {{ . }}
          {{- end }}
          {{- with .selectors }}
          selectors:
            {{- range . }}
            - cel: { expression: {{ quote . }} }
            {{- end }}
          {{- end }}
{{- end -}}

{{- /* The name of that template, which cannot be changed: another spec has another name. Takes "root",
"component" and "claim". */}}
{{- define "baton.claimTemplate" -}}
{{- printf "%s-%s-%s" (include "baton.name" .) .claim.name (include "baton.claimSpec" .claim | sha256sum | trunc 5) -}}
{{- end -}}

{{- /* A pod's claims; takes "root", "component" and the "claims" of the role. */}}
{{- define "baton.resourceClaims" -}}
resourceClaims:
  {{- range .claims }}
  - name: {{ .name }}
    {{- if .claimName }}
    resourceClaimName: {{ .claimName }}
    {{- else }}
    resourceClaimTemplateName: {{ .templateName | default (include "baton.claimTemplate" (dict "root" $.root "component" $.component "claim" .)) }}
    {{- end }}
  {{- end }}
{{- end -}}

{{- /* Takes (dict "root" $ "component" "prefill"). */}}
{{- define "baton.checkDevices" -}}
{{- $worker := get .root.Values .component -}}
{{- $kv := .root.Values.kv -}}
{{- if and $worker.gpus (not $worker.gpuResource) (not $worker.deviceClaims) -}}
{{- fail (printf "%s.gpuResource: is empty with gpus: 1; expected the resource of GPUs, such as nvidia.com/gpu, or %s.deviceClaims. Set one" .component .component) -}}
{{- end -}}
{{- if and $worker.networks (hasKey .root.Values.podAnnotations "k8s.v1.cni.cncf.io/networks") -}}
{{- fail (printf "%s.networks: is set, and so is this annotation in podAnnotations; expected one of them. Remove the annotation" .component) -}}
{{- end -}}
{{- if and (eq $kv.connector "cuda-ipc") (not (and $worker.gpus $worker.hostIPC)) -}}
{{- fail (printf "kv.connector: is cuda-ipc; expected %s.gpus: 1 and %s.hostIPC: true, without which pods cannot open each other's GPU memory. Set both, or another connector" .component .component) -}}
{{- end -}}
{{- if and $kv.requireRdma (ne $kv.connector "nixl") -}}
{{- fail (printf "kv.requireRdma: is true with kv.connector: %s; expected nixl, the only connector that uses RDMA. Set kv.connector: nixl" $kv.connector) -}}
{{- end -}}
{{- if and $worker.hostNetwork (has "kubernetes.io/hostname" $kv.near) -}}
{{- fail (printf "kv.near: has kubernetes.io/hostname with %s.hostNetwork; expected other topology keys, since workers on a host's network listen on the same ports. Remove it" .component) -}}
{{- end -}}
{{- end -}}
