{{- define "hybridindex.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "hybridindex.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "hybridindex.llm" -}}
{{- if and .Values.llm.enabled (not .Values.gpu.enabled) }}{{ fail "llm.enabled needs gpu.enabled: vLLM runs on the GPU; set llm.enabled=false for an index alone" }}{{ end }}
{{- if .Values.llm.enabled }}yes{{ end }}
{{- end }}

{{/* What all containers of hybridindex have alike. */}}
{{- define "hybridindex.container" -}}
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  runAsUser: 10001
  capabilities:
    drop: [ALL]
volumeMounts:
  - {name: data, mountPath: /data}
  - {name: tmp, mountPath: /tmp}
  - {name: keys, mountPath: /keys, readOnly: true}
{{- end }}
