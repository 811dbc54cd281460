{{- /* TLS, and what speaks in its place without: in the clear, which processes want to be told.
All take (dict "root" $ "component" "..."). */}}

{{- define "baton.tlsSecret" -}}
{{- get .root.Values.tls.existingSecrets .component | default (printf "%s-tls" (include "baton.name" .)) -}}
{{- end -}}

{{- define "baton.tlsEnv" -}}
{{- if .root.Values.tls.enabled }}
- name: BATON_TLS_CERT
  value: /etc/baton/tls/tls.crt
- name: BATON_TLS_KEY
  value: /etc/baton/tls/tls.key
- name: BATON_TLS_CA
  value: /etc/baton/tls/ca.crt
{{- else }}
# In the clear: network policies say who may connect.
- name: BATON_INSECURE
  value: "true"
{{- end }}
{{- end -}}

{{- define "baton.tlsMounts" -}}
{{- if .root.Values.tls.enabled }}
- { name: tls, mountPath: /etc/baton/tls, readOnly: true }
{{- end }}
{{- end -}}

{{- define "baton.tlsVolumes" -}}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret: { secretName: {{ include "baton.tlsSecret" . }}, defaultMode: 0440 }
{{- end }}
{{- end -}}

{{- /* The role that a certificate names; one of `worker` may be any of them, and so may change. */}}
{{- define "baton.tlsRole" -}}
{{- if and (ne .component "router") .root.Values.router.settings.elastic -}}
worker
{{- else -}}
{{- .component -}}
{{- end -}}
{{- end -}}

{{- /* DNS names: that by which processes know each other, and of a router those of its Services. */}}
{{- define "baton.tlsNames" -}}
{{- if ne .component "router" -}}
- baton-worker
{{- else -}}
- baton-router
- localhost # where a port-forward ends
{{- $router := include "baton.name" . }}
{{- range $name := list $router (printf "%s-headless" $router) }}
- {{ $name }}
- {{ $name }}.{{ $.root.Release.Namespace }}
- {{ $name }}.{{ $.root.Release.Namespace }}.svc
{{- end }}
{{- range .root.Values.tls.certManager.hosts }}
- {{ . | quote }}
{{- end }}
{{- end -}}
{{- end -}}

{{- /* Takes the root. */}}
{{- define "baton.checkTls" -}}
{{- $tls := .Values.tls -}}
{{- $issuer := $tls.certManager.issuer -}}
{{- if and (eq $tls.clientAuth "token") (not (and $tls.enabled .Values.router.tenantsSecret)) -}}
{{- fail "tls.clientAuth: token needs tls.enabled and router.tenantsSecret" -}}
{{- end -}}
{{- range $role := include "baton.components" . | splitList " " -}}
{{- $secret := get $tls.existingSecrets $role -}}
{{- if and $tls.enabled (not $secret) (not $issuer) -}}
{{- fail (printf "tls.existingSecrets.%s: is needed for tls.enabled, or tls.certManager.issuer, which makes it" $role) -}}
{{- end -}}
{{- if and (or $secret $issuer) (not $tls.enabled) -}}
{{- fail "tls.enabled: is false, though there are certificates; processes would speak in the clear" -}}
{{- end -}}
{{- end -}}
{{- end -}}
