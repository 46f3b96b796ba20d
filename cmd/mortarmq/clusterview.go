package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"sync"
	"text/tabwriter"
	"time"

	"golang.org/x/term"
)

const (
	// devEvery is how often the nodes are asked, devPatience how long for an answer: a process may have been stopped.
	devEvery    = 250 * time.Millisecond
	devPatience = time.Second
)

// devRow is a line of cluster dev.
type devRow struct {
	Node   int    `json:"node"`
	PID    int    `json:"pid"` // 0 while it does not run
	Client string `json:"client"`
	Admin  string `json:"admin"`
	State  string `json:"state"`
}

// watch shows the nodes' states, and starts those again that end, until ctx does.
func (d *devCluster) watch(ctx context.Context) error {
	show := d.showLines
	if f, ok := d.app.stdout.(*os.File); ok && !d.app.json && term.IsTerminal(int(f.Fd())) {
		show = d.showTable
	}
	var shown [devNodes]devRow
	for first := true; ; first = false {
		d.ask(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err := show(&shown, first); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case n := <-d.ended:
			if err := d.gone(n); err != nil {
				return err
			}
		case <-time.After(devEvery):
		}
		for _, n := range d.nodes {
			if n.cmd == nil && time.Now().After(n.back) {
				if err := d.start(n); err != nil {
					return err
				}
			}
		}
	}
}

// ask asks all nodes that run for their state.
func (d *devCluster) ask(ctx context.Context) {
	var states [devNodes]string
	var wg sync.WaitGroup
	for i, n := range d.nodes {
		if n.cmd != nil {
			wg.Go(func() { states[i] = healthOf(ctx, n.admin) })
		}
	}
	wg.Wait()
	for i, n := range d.nodes {
		switch {
		case n.cmd == nil:
		case states[i] != "":
			n.state, n.served = states[i], true
		case n.served:
			n.state = "no answer"
		}
	}
}

// healthOf returns what a node's /healthz says, "" without an answer.
func healthOf(ctx context.Context, admin string) string {
	ctx, cancel := context.WithTimeout(ctx, devPatience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+admin+"/healthz", nil)
	if err != nil {
		return ""
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return ""
	}
	defer resp.Body.Close()
	var h struct {
		State string `json:"state"`
	}
	if json.NewDecoder(resp.Body).Decode(&h) != nil {
		return ""
	}
	return h.State
}

func (n *devNode) row() devRow {
	r := devRow{Node: n.id, Client: n.client, Admin: n.admin, State: n.state}
	if n.cmd != nil {
		r.PID = n.cmd.Process.Pid
	}
	return r
}

// showLines prints what has changed.
func (d *devCluster) showLines(shown *[devNodes]devRow, first bool) error {
	for i, n := range d.nodes {
		r := n.row()
		if !first && r == shown[i] {
			continue
		}
		shown[i] = r
		if err := printRow(d.app, r); err != nil {
			return err
		}
	}
	return nil
}

// showTable draws the table over the last one.
func (d *devCluster) showTable(shown *[devNodes]devRow, first bool) error {
	changed := first
	for i, n := range d.nodes {
		r := n.row()
		changed = changed || r != shown[i]
		shown[i] = r
	}
	if !changed {
		return nil
	}
	var b bytes.Buffer
	if !first {
		fmt.Fprintf(&b, "\x1b[%dA", devNodes+1)
	}
	b.WriteString("\x1b[?7l") // what does not fit is cut: a wrapped line would be one more to go up
	b.Write(devTable(shown[:]))
	b.WriteString("\x1b[?7h")
	return d.app.write(b.Bytes())
}

// devTable is a table with a header, each line of which clears what was to the right of it.
func devTable(rows []devRow) []byte {
	var cells bytes.Buffer
	w := tabwriter.NewWriter(&cells, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "NODE\tPID\tCLIENT\tADMIN\tSTATE")
	for _, r := range rows {
		fmt.Fprintf(w, "%d\t%d\t%s\t%s\t%s\n", r.Node, r.PID, r.Client, r.Admin, r.State)
	}
	_ = w.Flush() // to memory
	return bytes.ReplaceAll(cells.Bytes(), []byte("\n"), []byte("\x1b[K\n"))
}
