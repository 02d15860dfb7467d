{{/* Names, labels and the parts that all components share. */}}

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
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{/* [registry/]repository@digest, or :tag. Called with (dict "root" $ "image" .Values.images.X). */}}
{{- define "keepstep.image" -}}
{{- $registry := trimSuffix "/" .root.Values.images.registry }}
{{- $repository := ternary (printf "%s/%s" $registry .image.repository) .image.repository (ne $registry "") }}
{{- if .image.digest }}
{{- printf "%s@%s" $repository .image.digest }}
{{- else }}
{{- printf "%s:%s" $repository (default .root.Chart.AppVersion .image.tag) }}
{{- end }}
{{- end }}

{{/* Called, as the next one, with (dict "root" $ "component" "admission"). */}}
{{- define "keepstep.serviceAccountName" -}}
{{- $account := (index .root.Values .component).serviceAccount }}
{{- if $account.create }}
{{- default (printf "%s-%s" (include "keepstep.fullname" .root) .component) $account.name }}
{{- else }}
{{- required (printf "%s.serviceAccount.create is false: name one that is there in %s.serviceAccount.name" .component .component) $account.name }}
{{- end }}
{{- end }}

{{/* Nothing where somebody else makes it; the roles are bound to it all the same. */}}
{{- define "keepstep.serviceAccount" -}}
{{- $account := (index .root.Values .component).serviceAccount }}
{{- if $account.create }}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ include "keepstep.serviceAccountName" . }}
  namespace: {{ .root.Release.Namespace | quote }}
  labels:
    {{- include "keepstep.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
  {{- with $account.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
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
priorityClassName: {{ . | quote }}
{{- end }}
{{- end }}

{{- /*
Replicas on nodes, and in zones, of their own where there are such. Not topologySpreadConstraints: of
two, the scheduler leaves both aside where nodes have no zone. Of a rollout, the new replicas alone
count (from Kubernetes 1.31 on): else two that met on one node lead both new ones to another one.
*/}}
{{- define "keepstep.apart" -}}
{{- if not (index .root.Values .component).affinity }}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      {{- range $key, $weight := dict "kubernetes.io/hostname" 100 "topology.kubernetes.io/zone" 50 }}
      - weight: {{ $weight }}
        podAffinityTerm:
          topologyKey: {{ $key }}
          matchLabelKeys: [pod-template-hash]
          labelSelector:
            matchLabels:
              {{- include "keepstep.selector" $.root | nindent 14 }}
              app.kubernetes.io/component: {{ $.component }}
      {{- end }}
{{- end }}
{{- end }}

{{- define "keepstep.pullSecrets" -}}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* The end of a process' arguments: the last one of an option holds. Called, as the next one, with
(dict "root" $ "component" "admission"). */}}
{{- define "keepstep.arguments" -}}
- --log-level={{ .root.Values.logLevel }}
{{- range (index .root.Values .component).extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{/* Environment of a process. */}}
{{- define "keepstep.environment" -}}
- name: KEEPSTEP_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
{{- with (index .root.Values .component).extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Annotations of what `helm test` makes. Called with the weight: lower ones come first. */}}
{{- define "keepstep.testHook" -}}
helm.sh/hook: test
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}
