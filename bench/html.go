package bench

import (
	_ "embed"
	"encoding/json"
	"html/template"
	"io"
)

//go:embed report.html.tmpl
var htmlText string

var htmlReport = template.Must(template.New("report").Parse(htmlText))

// WriteHTML writes a report that needs nothing but itself: tables, latency curves, throughput over time.
func WriteHTML(w io.Writer, env *Environment, samples []Sample) error {
	type row struct {
		Workload, Size string
		Cells          []string
	}
	data := struct {
		Env     *Environment
		Columns []string
		Rows    []row
		Ratios  []struct {
			Name  string
			Value float64
		}
		JSON template.JS
	}{Env: env}
	for _, c := range columns {
		data.Columns = append(data.Columns, c.name)
	}
	list := groups(samples)
	for _, g := range list {
		r := row{Workload: g.workload, Size: sizeName(g.size)}
		for _, c := range columns {
			r.Cells = append(r.Cells, g.spread(c.value).String())
		}
		data.Rows = append(data.Rows, r)
	}
	for _, r := range ratios(list) {
		data.Ratios = append(data.Ratios, struct {
			Name  string
			Value float64
		}{r.name, r.value})
	}
	text, err := json.Marshal(samples)
	if err != nil {
		return err
	}
	data.JSON = template.JS(text) // json.Marshal escapes what could end a script element
	return htmlReport.Execute(w, &data)
}
