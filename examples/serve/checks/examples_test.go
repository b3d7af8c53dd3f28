// Package examples checks the files of examples/serve against the types of Kubernetes and the parsers of Prometheus.
// Each check also gets a broken file, which it must refuse.
package examples

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	policy "k8s.io/api/policy/v1"
	"sigs.k8s.io/yaml"
)

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// replaced is the text with one part changed, which must be there exactly once.
func replaced(t *testing.T, text, old, new string) string {
	t.Helper()
	if strings.Count(text, old) != 1 {
		t.Fatalf("%q is there %d times", old, strings.Count(text, old))
	}
	return strings.Replace(text, old, new, 1)
}

// manifests are the objects of one file.
type manifests struct {
	deployments []apps.Deployment
	services    []core.Service
	budgets     []policy.PodDisruptionBudget
}

// decode refuses fields and types that Kubernetes does not know.
func decode(text string) (found manifests, err error) {
	for _, document := range regexp.MustCompile(`(?m)^---$`).Split(text, -1) {
		var kind struct{ APIVersion, Kind string }
		if err := yaml.Unmarshal([]byte(document), &kind); err != nil {
			return found, err
		}
		switch kind.APIVersion + " " + kind.Kind {
		case "apps/v1 Deployment":
			err = add(document, &found.deployments)
		case "v1 Service":
			err = add(document, &found.services)
		case "policy/v1 PodDisruptionBudget":
			err = add(document, &found.budgets)
		default:
			err = fmt.Errorf("%+v is not checked", kind)
		}
		if err != nil {
			return found, err
		}
	}
	return found, nil
}

func add[T any](document string, to *[]T) error {
	var one T
	if err := yaml.UnmarshalStrict([]byte(document), &one); err != nil {
		return err
	}
	*to = append(*to, one)
	return nil
}

func matches(selector, labels map[string]string) bool {
	for key, value := range selector {
		if labels[key] != value {
			return false
		}
	}
	return len(selector) > 0
}

// faults are what the types allow, and Kubernetes refuses or runs in another way than the file says.
func (found manifests) faults() (faults []string) {
	fault := func(format string, args ...any) { faults = append(faults, fmt.Sprintf(format, args...)) }
	for _, deployment := range found.deployments {
		name, pod := deployment.Name, deployment.Spec.Template
		if !matches(deployment.Spec.Selector.MatchLabels, pod.Labels) {
			fault("%s selects other pods", name)
		}
		if security := pod.Spec.SecurityContext; security == nil || security.RunAsUser == nil || security.RunAsNonRoot == nil || !*security.RunAsNonRoot {
			fault("%s does not set a user that is not root", name)
		}
		volumes := map[string]bool{}
		for _, volume := range pod.Spec.Volumes {
			volumes[volume.Name] = true
		}
		for _, container := range append(pod.Spec.InitContainers, pod.Spec.Containers...) {
			ports := map[string]bool{}
			for _, port := range container.Ports {
				ports[port.Name] = true
			}
			for _, mount := range container.VolumeMounts {
				if !volumes[mount.Name] {
					fault("%s mounts %s, which is no volume", container.Name, mount.Name)
				}
			}
			for _, probe := range []*core.Probe{container.StartupProbe, container.ReadinessProbe, container.LivenessProbe} {
				if probe == nil {
					continue
				}
				if get := probe.HTTPGet; get != nil && (!ports[get.Port.StrVal] || get.Path != "/healthz") {
					fault("%s: a probe asks %s of the port %s", container.Name, get.Path, get.Port.String())
				}
				if connect := probe.TCPSocket; connect != nil && !ports[connect.Port.StrVal] {
					fault("%s: a probe connects to the port %s", container.Name, connect.Port.String())
				}
			}
			security := container.SecurityContext
			if security == nil || security.ReadOnlyRootFilesystem == nil || !*security.ReadOnlyRootFilesystem || *security.AllowPrivilegeEscalation || security.Capabilities.Drop[0] != "ALL" {
				fault("%s has more rights than it needs", container.Name)
			}
			if container.Resources.Requests.Memory().IsZero() || container.Resources.Limits.Memory().IsZero() {
				fault("%s has no limit of memory", container.Name)
			}
			if grace := *pod.Spec.TerminationGracePeriodSeconds; seconds(container) >= grace {
				fault("%s: the pause and --drain take %d s, and the pod is killed after %d s", container.Name, seconds(container), grace)
			}
		}
	}
	for _, service := range found.services {
		is_selected := false
		for _, deployment := range found.deployments {
			is_selected = is_selected || matches(service.Spec.Selector, deployment.Spec.Template.Labels)
		}
		if !is_selected {
			fault("the service %s selects no pod", service.Name)
		}
	}
	for _, budget := range found.budgets {
		for _, deployment := range found.deployments {
			if !matches(budget.Spec.Selector.MatchLabels, deployment.Spec.Template.Labels) || int(*deployment.Spec.Replicas) <= budget.Spec.MinAvailable.IntValue() {
				fault("the budget %s lets no pod of %s stop, or does not select it", budget.Name, deployment.Name)
			}
		}
	}
	return faults
}

// seconds are what a container takes to stop.
func seconds(container core.Container) (total int64) {
	if hooks := container.Lifecycle; hooks != nil && hooks.PreStop.Sleep != nil {
		total += hooks.PreStop.Sleep.Seconds
	}
	for index, argument := range container.Args {
		if argument == "--drain" {
			var drain int64
			fmt.Sscanf(container.Args[index+1], "%ds", &drain)
			total += drain
		}
	}
	return total
}

const shared, sidecar = "../kubernetes/shared.yaml", "../kubernetes/sidecar.yaml"

func TestManifestsHaveTheFieldsOfKubernetes(t *testing.T) {
	for _, path := range []string{shared, sidecar} {
		found, err := decode(read(t, path))
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		if faults := found.faults(); len(faults) > 0 {
			t.Errorf("%s: %s", path, strings.Join(faults, "\n"))
		}
	}
	for _, broken := range [][2]string{
		{"  replicas: 2\n", "  replica: 2\n"},
		{"  replicas: 2\n", "  replicas: two\n"},
		{"maxUnavailable: 0", "maxUnavailable: { value: 0 }"},
		{"policy/v1\n", "policy/v1beta1\n"},
		{"fsGroup: 10001", "fsGroup: 10001\n        fsGroup: 10002"},
	} {
		if _, err := decode(replaced(t, read(t, shared), broken[0], broken[1])); err == nil {
			t.Errorf("%q is accepted", broken[1])
		}
	}
}

func TestFaultsOfManifestsAreFound(t *testing.T) {
	for _, broken := range [][3]string{
		{shared, "  selector: { app.kubernetes.io/name: leasehold }", "  selector: { app.kubernetes.io/name: leasehol }"},
		{shared, "minAvailable: 1", "minAvailable: 2"},
		{shared, "        - { name: tokens, mountPath", "        - { name: token, mountPath"},
		{shared, "tcpSocket: { port: http }", "tcpSocket: { port: https }"},
		{shared, "readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false"},
		{shared, "terminationGracePeriodSeconds: 30", "terminationGracePeriodSeconds: 5"},
		{shared, "        runAsUser: 10001\n", ""},
		{sidecar, "        - name: socket\n", "        - name: sockets\n"},
	} {
		found, err := decode(replaced(t, read(t, broken[0]), broken[1], broken[2]))
		if err != nil {
			t.Fatalf("%q: %v", broken[2], err)
		}
		if len(found.faults()) == 0 {
			t.Errorf("%q is not found", broken[2])
		}
	}
}

func TestSharedServersAreReplacedWithoutAGap(t *testing.T) {
	found, err := decode(read(t, shared))
	if err != nil {
		t.Fatal(err)
	}
	deployment := found.deployments[0]
	rolling := deployment.Spec.Strategy.RollingUpdate
	if *deployment.Spec.Replicas < 2 || rolling.MaxUnavailable.IntValue() != 0 || rolling.MaxSurge.IntValue() < 1 {
		t.Errorf("%d replicas, %v", *deployment.Spec.Replicas, rolling)
	}
	server := deployment.Spec.Template.Spec.Containers[0]
	if server.ReadinessProbe.HTTPGet.Path != "/healthz" || server.LivenessProbe.HTTPGet != nil {
		t.Error("an outage of the store makes a server unready, and does not restart it")
	}
	if len(found.services) != 1 || len(found.budgets) != 1 {
		t.Errorf("%d services, %d budgets", len(found.services), len(found.budgets))
	}
}

// dashboards are the files of Grafana with the expressions of their panels.
func dashboards(t *testing.T) map[string][]string {
	paths, err := filepath.Glob("../../grafana/*.json")
	if err != nil || len(paths) < 2 {
		t.Fatalf("%v %v", paths, err)
	}
	all := map[string][]string{}
	for _, path := range paths {
		var dashboard struct {
			UID    string
			Panels []struct {
				Title   string
				GridPos struct{ X, Y, W, H int }
				Targets []struct{ Expr string }
			}
		}
		if err := json.NewDecoder(bytes.NewReader([]byte(read(t, path)))).Decode(&dashboard); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		taken := map[[2]int]string{}
		for _, panel := range dashboard.Panels {
			if len(panel.Targets) == 0 || panel.Title == "" {
				t.Errorf("%s: %q shows nothing", path, panel.Title)
			}
			for x := panel.GridPos.X; x < panel.GridPos.X+panel.GridPos.W; x++ {
				for y := panel.GridPos.Y; y < panel.GridPos.Y+panel.GridPos.H; y++ {
					if other := taken[[2]int{x, y}]; other != "" || x >= 24 {
						t.Errorf("%s: %q covers %q", path, panel.Title, other)
					}
					taken[[2]int{x, y}] = panel.Title
				}
			}
			for _, target := range panel.Targets {
				all[path] = append(all[path], target.Expr)
			}
		}
	}
	return all
}
