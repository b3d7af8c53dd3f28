package examples

import (
	"context"
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/promql/promqltest"
)

const rules = "../prometheus/leasehold.rules.yaml"

var prom = parser.NewParser(parser.Options{})

func parse(text string) (*rulefmt.RuleGroups, []error) {
	return rulefmt.Parse([]byte(text), false, model.UTF8Validation, prom, slog.Default())
}

func alerts(t *testing.T) map[string]string {
	groups, errs := parse(read(t, rules))
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	all := map[string]string{}
	for _, group := range groups.Groups {
		for _, rule := range group.Rules {
			if all[rule.Alert] != "" || rule.Labels["severity"] == "" || rule.Annotations["summary"] == "" || rule.Annotations["description"] == "" {
				t.Errorf("%s is there twice, or lacks a severity, a summary or a description", rule.Alert)
			}
			all[rule.Alert] = rule.Expr
		}
	}
	return all
}

func TestAlertsAreRulesOfPrometheus(t *testing.T) {
	alerts(t)
	for _, broken := range [][2]string{
		{"expr: absent(leasehold_store_up)", "expr: absent(leasehold_store_up"},
		{"expr: absent(leasehold_store_up)", "expression: absent(leasehold_store_up)"},
		{"summary: No server of leasehold has metrics", "summary: No {{ $labels.instance has metrics"},
		{"  - name: leasehold-library", "  - name: leasehold-server"},
	} {
		if _, errs := parse(replaced(t, read(t, rules), broken[0], broken[1])); len(errs) == 0 {
			t.Errorf("%q is accepted", broken[1])
		}
	}
}

// Each alert has series with which it fires and series with which it is silent, both of 20 minutes.
var series = map[string][2]string{
	"LeaseholdNoServer":                {`other 1x20`, `leasehold_store_up 0x20`},
	"LeaseholdStoreUnavailable":        {"leasehold_store_up{job=\"a\",instance=\"1\"} 0x20\nleasehold_store_up{job=\"a\",instance=\"2\"} 0x20", "leasehold_store_up{job=\"a\",instance=\"1\"} 0x20\nleasehold_store_up{job=\"a\",instance=\"2\"} 1x20"},
	"LeaseholdStoreUnreachable":        {"leasehold_store_up{instance=\"1\"} 0x20\nleasehold_store_up{instance=\"2\"} 1x20", "leasehold_store_up{instance=\"1\"} 1x20"},
	"LeaseholdListOld":                 {"leasehold_store_age_seconds 0+60x20", "leasehold_store_age_seconds 5x20"},
	"LeaseholdStoreSlow":               {latency("leasehold_store_latency_seconds", "", "0.1", "1.0"), latency("leasehold_store_latency_seconds", "", "0.005", "0.01")},
	"LeaseholdLeasesLost":              {counter("leasehold_serve_leases_lost_total", `kind="mutex"`, 1), counter("leasehold_serve_leases_lost_total", `kind="mutex"`, 0)},
	"LeaseholdWaitTooLong":             {`leasehold_store_oldest_wait_seconds{kind="mutex"} 0+60x20`, `leasehold_store_oldest_wait_seconds{kind="mutex"} 60x20`},
	"LeaseholdQueueLong":               {`leasehold_store_waiters{kind="mutex"} 101x20`, `leasehold_store_waiters{kind="mutex"} 99x20`},
	"LeaseholdConnectionsRefused":      {counter("leasehold_serve_refused_connections_total", `reason="too_many"`, 1), counter("leasehold_serve_refused_connections_total", `reason="no_http"`, 1)},
	"LeaseholdRequestsFail":            {counter("leasehold_serve_requests_total", `path="/v1/locks",status="503"`, 60), counter("leasehold_serve_requests_total", `path="/healthz",status="503"`, 60)},
	"LeaseholdLibraryLeasesLost":       {counter("leasehold_leases_lost_total", `kind="mutex",cause="gone"`, 1), counter("leasehold_leases_lost_total", `kind="mutex",cause="max_hold"`, 1)},
	"LeaseholdLibraryRenewalsFail":     {counter("leasehold_renewals_total", `store="redis",outcome="failed"`, 1), counter("leasehold_renewals_total", `store="redis",outcome="ok"`, 1)},
	"LeaseholdLibraryStoreUnavailable": {counter("leasehold_acquisitions_total", `store="redis",outcome="unavailable"`, 1), counter("leasehold_acquisitions_total", `store="redis",outcome="timeout"`, 1)},
	"LeaseholdLibraryWaitsLong":        {latency("leasehold_wait_seconds", `label="a",`, "60", "300"), latency("leasehold_wait_seconds", `label="a",`, "0.1", "1.0")},
	"LeaseholdLibraryQueueLong":        {"leasehold_attempts_waiting{label=\"a\",instance=\"1\"} 60x20\nleasehold_attempts_waiting{label=\"a\",instance=\"2\"} 60x20", `leasehold_attempts_waiting{label="a"} 60x20`},
	"LeaseholdLibraryClocksDiffer":     {`leasehold_clock_offset_seconds{store="redis"} -2x20`, `leasehold_clock_offset_seconds{store="redis"} 0.5x20`},
}

func counter(name, labels string, step int) string {
	return fmt.Sprintf("%s{%s} 0+%dx20", name, labels, step)
}

// latency is a histogram whose values lie between the two bounds.
func latency(name, labels, low, high string) string {
	bucket := func(bound string, step int) string {
		return fmt.Sprintf("%s_bucket{%sle=%q} 0+%dx20\n", name, labels, bound, step)
	}
	return bucket(low, 0) + bucket(high, 60) + bucket("+Inf", 60)
}

func TestEachAlertFiresAndIsSilent(t *testing.T) {
	all := alerts(t)
	if len(all) != len(series) {
		t.Errorf("%d alerts, and series for %d", len(all), len(series))
	}
	engine := promqltest.NewTestEngine(t, false, 0, promqltest.DefaultMaxSamplesPerQuery)
	for alert, expression := range all {
		for index, load := range series[alert] {
			storage := promqltest.LoadedStorage(t, "load 1m\n  "+strings.ReplaceAll(strings.TrimSpace(load), "\n", "\n  ")+"\n")
			query, err := engine.NewInstantQuery(context.Background(), storage, nil, expression, time.Unix(20*60, 0))
			if err != nil {
				t.Fatal(err)
			}
			result := query.Exec(context.Background())
			if result.Err != nil {
				t.Fatal(result.Err)
			}
			if fires := len(result.Value.(promql.Vector)) > 0; fires != (index == 0) {
				t.Errorf("%s fires: %v, with\n%s", alert, fires, load)
			}
			query.Close()
		}
	}
}

// metric is what the documents say of one.
type metric struct {
	is_histogram bool
	labels       []string
}

func documented(t *testing.T) map[string]metric {
	all := map[string]metric{}
	word := regexp.MustCompile("`([^`]+)`")
	for _, page := range []struct {
		path           string
		names, labels  int
		histogram_cell int
	}{{"../../../docs/metrics.md", 1, 4, 2}, {"../../../docs/operations.md", 1, 2, 3}} {
		for _, line := range strings.Split(read(t, page.path), "\n") {
			if !strings.HasPrefix(line, "| `leasehold_") {
				continue
			}
			cells, labels := strings.Split(line, "|"), []string{"job", "instance"}
			for _, label := range word.FindAllStringSubmatch(cells[page.labels], -1) {
				labels = append(labels, label[1])
			}
			for _, name := range word.FindAllStringSubmatch(cells[page.names], -1) {
				all[name[1]] = metric{strings.HasPrefix(strings.TrimSpace(cells[page.histogram_cell]), "histogram"), labels}
			}
		}
	}
	if len(all) < 25 {
		t.Fatalf("only %d metrics are documented", len(all))
	}
	return all
}

// unknown are the metrics and labels of an expression that the documents do not have.
func unknown(expression string, known map[string]metric) (faults []string) {
	parsed, err := prom.ParseExpr(expression)
	if err != nil {
		return []string{err.Error()}
	}
	parser.Inspect(parsed, func(node parser.Node, path []parser.Node) error {
		selector, is_selector := node.(*parser.VectorSelector)
		if !is_selector {
			return nil
		}
		name := selector.Name
		found, is_known := known[name]
		for _, part := range []string{"_bucket", "_sum", "_count"} {
			if base, has_part := strings.CutSuffix(name, part); has_part && known[base].is_histogram {
				found, is_known = metric{false, append(slices.Clone(known[base].labels), "le")}, true
			}
		}
		if !is_known || found.is_histogram {
			faults = append(faults, name)
		}
		used := []string{}
		for _, matcher := range selector.LabelMatchers {
			used = append(used, matcher.Name)
		}
		for _, above := range path {
			if aggregate, is_aggregate := above.(*parser.AggregateExpr); is_aggregate {
				used = append(used, aggregate.Grouping...)
			}
		}
		for _, label := range used {
			if label != labels.MetricName && !slices.Contains(found.labels, label) {
				faults = append(faults, name+" has no label "+label)
			}
		}
		return nil
	})
	return faults
}

func TestEveryExpressionHasMetricsAndLabelsOfTheDocuments(t *testing.T) {
	known := documented(t)
	for alert, expression := range alerts(t) {
		if faults := unknown(expression, known); len(faults) > 0 {
			t.Errorf("%s: %v", alert, faults)
		}
	}
	variables := strings.NewReplacer("$__rate_interval", "5m", "$__range", "5m", "$job", ".*", "$label", ".*", "$store", ".*")
	for path, expressions := range dashboards(t) {
		for _, expression := range expressions {
			if faults := unknown(variables.Replace(expression), known); len(faults) > 0 {
				t.Errorf("%s: %s: %v", path, expression, faults)
			}
		}
	}
	for _, broken := range []string{
		"leasehold_store_upp == 0",
		"leasehold_wait_seconds > 1",
		"leasehold_store_up_bucket",
		`leasehold_store_up{kind="mutex"}`,
		"sum by (outcome) (leasehold_store_waiters)",
		"sum(",
	} {
		if len(unknown(broken, known)) == 0 {
			t.Errorf("%s is accepted", broken)
		}
	}
}
