package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/mortarmq/mortarmq/engine/replica"
)

const manifestDir = "../../deploy/kubernetes"

// The types below have the fields that the manifests use and no others: checkNames refuses what isn't here, be it only
// misspelt. A field's key is its name with a small first letter, or its tag.

type kubeMeta struct {
	Name                string
	Labels, Annotations map[string]string
}

type kubeSelector struct{ MatchLabels map[string]string }

type kubeService struct {
	APIVersion string `json:"apiVersion"`
	Kind       string
	Metadata   kubeMeta
	Spec       struct {
		ClusterIP                string `json:"clusterIP"`
		PublishNotReadyAddresses bool
		Selector                 map[string]string
		Ports                    []struct {
			Name       string
			Port       int
			TargetPort string
		}
	}
}

type kubeProbe struct {
	HTTPGet                                         *struct{ Path, Port string } `json:"httpGet"`
	TCPSocket                                       *struct{ Port string }       `json:"tcpSocket"`
	PeriodSeconds, TimeoutSeconds, FailureThreshold int
}

type kubeContainer struct {
	Name, Image, ImagePullPolicy string
	Args                         []string
	Env                          []struct {
		Name, Value string
		ValueFrom   struct{ FieldRef struct{ FieldPath string } }
	}
	Ports []struct {
		Name          string
		ContainerPort int
	}
	ReadinessProbe, LivenessProbe, StartupProbe kubeProbe
	Resources                                   struct{ Requests, Limits map[string]string }
	SecurityContext                             struct {
		AllowPrivilegeEscalation, ReadOnlyRootFilesystem bool
		Capabilities                                     struct{ Drop []string }
	}
	VolumeMounts []struct {
		Name, MountPath string
		ReadOnly        bool
	}
}

type kubeStatefulSet struct {
	APIVersion string `json:"apiVersion"`
	Kind       string
	Metadata   kubeMeta
	Spec       struct {
		ServiceName, PodManagementPolicy     string
		Replicas, MinReadySeconds            int
		UpdateStrategy                       struct{ Type string }
		PersistentVolumeClaimRetentionPolicy struct{ WhenDeleted, WhenScaled string }
		Selector                             kubeSelector
		Template                             struct {
			Metadata kubeMeta
			Spec     struct {
				TerminationGracePeriodSeconds                    int
				EnableServiceLinks, AutomountServiceAccountToken bool
				Affinity                                         struct {
					PodAntiAffinity struct {
						RequiredDuringSchedulingIgnoredDuringExecution []struct {
							TopologyKey   string
							LabelSelector kubeSelector
						}
					}
				}
				TopologySpreadConstraints []struct {
					TopologyKey, WhenUnsatisfiable string
					MaxSkew                        int
					LabelSelector                  kubeSelector
				}
				SecurityContext struct {
					RunAsNonRoot                   bool
					RunAsUser, RunAsGroup, FsGroup int
					FsGroupChangePolicy            string
					SeccompProfile                 struct{ Type string }
				}
				Containers []kubeContainer
				Volumes    []struct {
					Name      string
					ConfigMap *struct{ Name string }
					Secret    *struct {
						SecretName  string
						DefaultMode int
					}
				}
			}
		}
		VolumeClaimTemplates []struct {
			Metadata kubeMeta
			Spec     struct {
				AccessModes []string
				Resources   struct{ Requests map[string]string }
			}
		}
	}
}

type kubeBudget struct {
	APIVersion string `json:"apiVersion"`
	Kind       string
	Metadata   kubeMeta
	Spec       struct {
		MaxUnavailable int
		Selector       kubeSelector
	}
}

type kubePolicy struct {
	APIVersion string `json:"apiVersion"`
	Kind       string
	Metadata   kubeMeta
	Spec       struct {
		PodSelector kubeSelector
		PolicyTypes []string
		Ingress     []struct {
			From  []struct{ PodSelector, NamespaceSelector *kubeSelector }
			Ports []struct{ Port string }
		}
	}
}

type kubeData struct { // ConfigMap, Secret, Namespace
	APIVersion       string `json:"apiVersion"`
	Kind             string
	Metadata         kubeMeta
	Type             string
	Data, StringData map[string]string
}

type kustomization struct {
	APIVersion string `json:"apiVersion"`
	Kind       string
	Namespace  string
	Resources  []string
	Images     []struct{ Name, NewTag string }
}

// manifests are the objects of deploy/kubernetes.
type manifests struct {
	kustomization kustomization
	namespace     kubeData
	config        kubeData
	secret        kubeData
	services      map[string]kubeService
	set           kubeStatefulSet
	budget        kubeBudget
	policy        kubePolicy
}

// readManifests reads what the kustomization lists, which must be every file.
func readManifests(t *testing.T) *manifests {
	t.Helper()
	m := &manifests{services: make(map[string]kubeService)}
	decodeManifest(t, "kustomization.yaml", documents(t, "kustomization.yaml")[0], &m.kustomization)
	files, err := filepath.Glob(filepath.Join(manifestDir, "*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range files {
		name := filepath.Base(path)
		if name == "kustomization.yaml" {
			continue
		}
		if !slices.Contains(m.kustomization.Resources, name) {
			t.Errorf("%s is not in kustomization.yaml", name)
		}
	}
	for _, name := range m.kustomization.Resources {
		for _, doc := range documents(t, name) {
			switch kind := fmt.Sprint(doc["apiVersion"], " ", doc["kind"]); kind {
			case "v1 Namespace":
				decodeManifest(t, name, doc, &m.namespace)
			case "v1 ConfigMap":
				decodeManifest(t, name, doc, &m.config)
			case "v1 Secret":
				decodeManifest(t, name, doc, &m.secret)
			case "v1 Service":
				var s kubeService
				decodeManifest(t, name, doc, &s)
				m.services[s.Metadata.Name] = s
			case "apps/v1 StatefulSet":
				decodeManifest(t, name, doc, &m.set)
			case "policy/v1 PodDisruptionBudget":
				decodeManifest(t, name, doc, &m.budget)
			case "networking.k8s.io/v1 NetworkPolicy":
				decodeManifest(t, name, doc, &m.policy)
			default:
				t.Errorf("%s: %s is unexpected", name, kind)
			}
		}
	}
	return m
}

// documents returns the documents of a YAML file.
func documents(t *testing.T, name string) []map[string]any {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(manifestDir, name))
	if err != nil {
		t.Fatal(err)
	}
	var all []map[string]any
	for dec := yaml.NewDecoder(bytes.NewReader(text)); ; {
		var doc map[string]any
		err := dec.Decode(&doc)
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		all = append(all, doc)
	}
}

func decodeManifest(t *testing.T, name string, doc map[string]any, into any) {
	t.Helper()
	checkNames(t, name, doc, reflect.TypeOf(into).Elem())
	text, err := json.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, into); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
}

// checkNames fails the test for every key of value that is no field of type want.
func checkNames(t *testing.T, at string, value any, want reflect.Type) {
	t.Helper()
	if want.Kind() == reflect.Pointer {
		want = want.Elem()
	}
	switch v := value.(type) {
	case []any:
		if want.Kind() != reflect.Slice {
			t.Errorf("%s is a list", at)
			return
		}
		for i, e := range v {
			checkNames(t, fmt.Sprintf("%s[%d]", at, i), e, want.Elem())
		}
	case map[string]any:
		if want.Kind() == reflect.Map {
			return
		}
		for key, e := range v {
			found := false
			for i := range want.NumField() {
				f := want.Field(i)
				name := f.Tag.Get("json")
				if name == "" {
					name = strings.ToLower(f.Name[:1]) + f.Name[1:]
				}
				if found = name == key; found {
					checkNames(t, at+"."+key, e, f.Type)
					break
				}
			}
			if !found {
				t.Errorf("%s has the field %s, which is unknown or misspelt", at, key)
			}
		}
	}
}

// settings returns the configuration of each pod, with a secret that can be read.
func (m *manifests) settings(t *testing.T) []Config {
	t.Helper()
	all := make([]Config, m.set.Spec.Replicas)
	for i := range all {
		name := fmt.Sprintf("%s-%d.json", m.set.Metadata.Name, i)
		text, ok := m.config.Data[name]
		if !ok {
			t.Fatalf("the ConfigMap has no %s", name)
		}
		all[i] = Default()
		if err := all[i].parseFile([]byte(text)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	return all
}

func TestKubernetes_EachPodHasTheConfigurationOfItsNode(t *testing.T) {
	m := readManifests(t)
	set, spec := &m.set, &m.set.Spec
	headless := m.services[spec.ServiceName]
	pod := spec.Template.Spec
	mortard := pod.Containers[0]
	mounts, ports := make(map[string]string), make(map[string]int)
	for _, v := range mortard.VolumeMounts {
		mounts[v.Name] = v.MountPath
	}
	for _, p := range mortard.Ports {
		ports[p.Name] = p.ContainerPort
	}
	if spec.Replicas != replica.MaxNodes || len(m.config.Data) != spec.Replicas {
		t.Errorf("%d replicas, %d configurations", spec.Replicas, len(m.config.Data))
	}
	if want := []string{"--config", mounts["config"] + "/$(POD_NAME).json"}; !slices.Equal(mortard.Args, want) ||
		mortard.Env[0].Name != "POD_NAME" || mortard.Env[0].ValueFrom.FieldRef.FieldPath != "metadata.name" {
		t.Errorf("mortard is called with %q", mortard.Args)
	}
	host := func(i int) string {
		return fmt.Sprintf("%s-%d.%s.%s.svc", set.Metadata.Name, i, headless.Metadata.Name, m.kustomization.Namespace)
	}
	for i, c := range m.settings(t) {
		if c.NodeID != i || c.DataDir != mounts["data"] || c.PeerSecretFile != mounts["peers"]+"/secret" {
			t.Errorf("node %d is %+v", i, c)
		}
		for key, addr := range map[string]string{"client": c.ListenClient, "peer": c.ListenPeer, "admin": c.ListenAdmin} {
			if want := fmt.Sprintf("0.0.0.0:%d", ports[key]); addr != want {
				t.Errorf("node %d listens for %s on %s, the container's port is %d", i, key, addr, ports[key])
			}
		}
		for k, p := range c.Peers {
			want := Peer{k, fmt.Sprintf("%s:%d", host(k), ports["peer"]), fmt.Sprintf("%s:%d", host(k), ports["client"])}
			if p != want {
				t.Errorf("node %d knows %+v, not %+v", i, p, want)
			}
		}
		// What has to be filled in is refused as it stands, and everything else is accepted.
		c.PeerSecretFile = secretFile(t, m.secret.StringData["secret"])
		err := c.Validate()
		if err == nil || !strings.Contains(err.Error(), "peer_secret_file") || !strings.Contains(err.Error(), "auth_token_digests[0]") {
			t.Errorf("node %d starts without a secret and a token of its own: %v", i, err)
		}
		c.PeerSecretFile, c.AuthTokenDigests = secretFile(t, goodSecret), []string{digest}
		if err := c.Validate(); err != nil {
			t.Errorf("node %d: %v", i, err)
		}
	}
}

func TestKubernetes_ObjectsReferToEachOther(t *testing.T) {
	m := readManifests(t)
	spec := &m.set.Spec
	pod := spec.Template.Spec
	mortard := pod.Containers[0]
	labels := spec.Template.Metadata.Labels
	for name, s := range map[string]map[string]string{
		"the StatefulSet": spec.Selector.MatchLabels, "the budget": m.budget.Spec.Selector.MatchLabels,
		"the policy": m.policy.Spec.PodSelector.MatchLabels, "the service": m.services["mortarmq"].Spec.Selector,
		"the headless service": m.services[spec.ServiceName].Spec.Selector,
		"the anti-affinity":    pod.Affinity.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution[0].LabelSelector.MatchLabels,
		"the spread":           pod.TopologySpreadConstraints[0].LabelSelector.MatchLabels,
	} {
		if len(s) == 0 || !maps.Equal(s, labels) {
			t.Errorf("%s selects %v, the pods have %v", name, s, labels)
		}
	}
	ports := make(map[string]int)
	for _, p := range mortard.Ports {
		ports[p.Name] = p.ContainerPort
	}
	for _, s := range m.services {
		for _, p := range s.Spec.Ports {
			if ports[p.TargetPort] != p.Port {
				t.Errorf("service %s has port %d for %s", s.Metadata.Name, p.Port, p.TargetPort)
			}
		}
	}
	for _, rule := range m.policy.Spec.Ingress {
		for _, p := range rule.Ports {
			if ports[p.Port] == 0 || (p.Port != "client" && len(rule.From) == 0) {
				t.Errorf("the policy lets %v reach %s", rule.From, p.Port)
			}
		}
	}
	volumes := make(map[string]bool)
	for _, v := range pod.Volumes {
		volumes[v.Name] = true
		if (v.ConfigMap != nil && v.ConfigMap.Name != m.config.Metadata.Name) || (v.Secret != nil && v.Secret.SecretName != m.secret.Metadata.Name) {
			t.Errorf("the volume %s is of something that does not exist", v.Name)
		}
	}
	for _, c := range spec.VolumeClaimTemplates {
		volumes[c.Metadata.Name] = true
	}
	for _, v := range mortard.VolumeMounts {
		if !volumes[v.Name] {
			t.Errorf("the volume %s is mounted and does not exist", v.Name)
		}
	}
	if m.namespace.Metadata.Name != m.kustomization.Namespace || m.kustomization.Images[0].Name != mortard.Image {
		t.Errorf("the kustomization is of namespace %s and image %s", m.kustomization.Namespace, m.kustomization.Images[0].Name)
	}
}

func TestKubernetes_AMajorityStaysWhileOneNodeGoes(t *testing.T) {
	m := readManifests(t)
	spec := &m.set.Spec
	pod := spec.Template.Spec
	mortard := pod.Containers[0]
	headless := m.services[spec.ServiceName]
	if spec.PodManagementPolicy != "Parallel" || headless.Spec.ClusterIP != "None" || !headless.Spec.PublishNotReadyAddresses {
		t.Error("the nodes could not find each other before they are ready, and none becomes ready alone")
	}
	if m.budget.Spec.MaxUnavailable != 1 || spec.UpdateStrategy.Type != "RollingUpdate" || spec.MinReadySeconds == 0 {
		t.Errorf("%d nodes may go at once", m.budget.Spec.MaxUnavailable)
	}
	if key := pod.Affinity.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution[0].TopologyKey; key != "kubernetes.io/hostname" {
		t.Errorf("two nodes may be on one %s", key)
	}
	if p := mortard.ReadinessProbe.HTTPGet; p == nil || p.Path != "/healthz" || p.Port != "admin" {
		t.Errorf("readiness is %+v", mortard.ReadinessProbe)
	}
	// /healthz is 503 without a majority: as liveness it would kill what is left of the cluster.
	if mortard.LivenessProbe.HTTPGet != nil || mortard.LivenessProbe.TCPSocket == nil || mortard.StartupProbe.TCPSocket == nil {
		t.Errorf("liveness is %+v", mortard.LivenessProbe)
	}
	if grace := time.Duration(pod.TerminationGracePeriodSeconds) * time.Second; grace < drainTimeout+closeTimeout+adminTimeout {
		t.Errorf("a node is killed after %v, and its end in order may take longer", grace)
	}
	if p := spec.PersistentVolumeClaimRetentionPolicy; p.WhenDeleted != "Retain" || p.WhenScaled != "Retain" {
		t.Error("the data goes with the StatefulSet")
	}
	if s := mortard.SecurityContext; !pod.SecurityContext.RunAsNonRoot || s.AllowPrivilegeEscalation || !s.ReadOnlyRootFilesystem ||
		!slices.Equal(s.Capabilities.Drop, []string{"ALL"}) || pod.AutomountServiceAccountToken {
		t.Error("the pods have privileges")
	}
	dockerfile, err := os.ReadFile("../../deploy/Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	if user := strconv.Itoa(pod.SecurityContext.RunAsUser); !strings.Contains(string(dockerfile), "USER "+user+":"+user) {
		t.Errorf("the image's user is not %s", user)
	}
}
