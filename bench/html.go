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

// WriteHTML writes a report that needs nothing but itself: the tables, latency curves by percentile, throughput over time,
// where the CPU time went, and the course of long runs.
func WriteHTML(w io.Writer, env *Environment, samples []Sample) error {
	type table struct {
		Title   string
		Columns []string
		Rows    [][]string
	}
	data := struct {
		Env    *Environment
		Tables []table
		JSON   template.JS
	}{Env: env}
	for _, s := range sheets(samples) {
		data.Tables = append(data.Tables, table{s.title, s.columns, s.rows})
	}
	text, err := json.Marshal(samples)
	if err != nil {
		return err
	}
	data.JSON = template.JS(text) // json.Marshal escapes what could end a script element
	return htmlReport.Execute(w, &data)
}
