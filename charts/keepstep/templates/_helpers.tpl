{{/* Names, labels and the parts that all three Deployments share. */}}

{{- define "keepstep.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "keepstep.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "keepstep.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "keepstep.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "keepstep.testNamespace" -}}
{{- default (printf "%s-test" (include "keepstep.fullname" .)) .Values.test.namespace }}
{{- end }}

{{- define "keepstep.labels" -}}
{{ include "keepstep.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "keepstep.selector" -}}
app.kubernetes.io/name: {{ include "keepstep.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* repository@digest, or repository:tag. Called with (dict "root" $ "image" .Values.images.X). */}}
{{- define "keepstep.image" -}}
{{- if .image.digest }}
{{- printf "%s@%s" .image.repository .image.digest }}
{{- else }}
{{- printf "%s:%s" .image.repository (default .root.Chart.AppVersion .image.tag) }}
{{- end }}
{{- end }}

{{- define "keepstep.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
# the group in which the kubelet makes mounted Secrets readable
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "keepstep.securityContext" -}}
runAsNonRoot: true
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* What a user may set of a pod. Called with one of .Values.admission, .reconcile, .certificates. */}}
{{- define "keepstep.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{- define "keepstep.pullSecrets" -}}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* Environment of every process. */}}
{{- define "keepstep.environment" -}}
- name: KEEPSTEP_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
{{- end }}

{{/* Annotations of what `helm test` makes. Called with the weight: lower ones come first. */}}
{{- define "keepstep.testHook" -}}
helm.sh/hook: test
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}
