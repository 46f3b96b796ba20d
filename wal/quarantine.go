package wal

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
)

const (
	quarantineDir  = "quarantine"
	reportPrefix   = "quarantine-"
	reportSuffix   = ".json"
	metadataReport = "report.json"
	maxReportBytes = 1 << 20
)

// QuarantineReport says what is not served any more, and why. It is written as JSON beside a partition's files, or with
// the metadata that was moved away. Nothing is ever deleted or cut because it can't be read: repair it, or restore it
// from elsewhere, then remove the report and restart. A partition that has one isn't served, whatever its files look
// like: what was found once must not come and go.
type QuarantineReport struct {
	// Stream is what is not served.
	Stream StreamID `json:"stream"`
	// Path and Offset are the damaged place, Sequence the first record affected; zero where not known.
	Path     string   `json:"path"`
	Offset   int64    `json:"offset"`
	Sequence Sequence `json:"sequence"`
	// Cause says what is wrong.
	Cause string `json:"cause"`
	// TimeMs is when it was found, Unix milliseconds.
	TimeMs uint64 `json:"time_unix_ms"`
	// Report is the path of the file that holds this.
	Report string `json:"-"`
	// Err is the error itself, a *CorruptionError or what wraps one; of a partition that an earlier start has reported, one
	// that says so; nil for the metadata of an earlier start.
	Err error `json:"-"`
}

// newReport describes err, found in the files of id.
func newReport(id StreamID, err error, nowMs uint64) QuarantineReport {
	r := QuarantineReport{Stream: id, Cause: err.Error(), TimeMs: nowMs, Err: err}
	var c *CorruptionError
	if errors.As(err, &c) {
		r.Path, r.Offset, r.Sequence = c.Path, c.Offset, c.Sequence
	}
	return r
}

// decodeReport reads a report. What can't be decoded is the cause as it stands: an operator may have written it.
func decodeReport(path string, b []byte) QuarantineReport {
	r := QuarantineReport{Report: path}
	if err := json.Unmarshal(b, &r); err != nil {
		r = QuarantineReport{Report: path, Cause: strings.TrimSpace(string(b))}
	}
	return r
}

// isReport tells whether a file of a partition's directory is a report.
func isReport(name string) bool {
	return strings.HasPrefix(name, reportPrefix) && strings.HasSuffix(name, reportSuffix)
}

func (r *QuarantineReport) encode() []byte {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		panic(fmt.Sprintf("wal: encoding a report of plain fields: %v", err))
	}
	return append(b, '\n')
}

// quarantine stops the reads of a partition and writes a report beside its files. What is committed from now on is
// still written. During recovery only the first is done: announce follows when it is known which topics were deleted.
func (s *Store) quarantine(st *stream, err error) {
	if st.bad != nil {
		return
	}
	st.bad = err
	r := newReport(st.id, err, s.o.Wall())
	r.Report = st.report
	if st.report == "" {
		r.Report = filepath.Join(st.dir, reportPrefix+fmt.Sprint(r.TimeMs)+reportSuffix)
	}
	if s.recovering {
		s.reports = append(s.reports, r)
		return
	}
	s.announce(st, r)
}

// announce tells everybody that a partition is quarantined.
func (s *Store) announce(st *stream, r QuarantineReport) {
	s.log.Error("quarantined: its files aren't served until they are repaired", "stream", st.id, "report", r.Report, "err", r.Err)
	if st.report == "" {
		st.report = r.Report
		s.publish.add(&publication{
			path: r.Report, hint: true, st: st,
			build: func() [][]byte { return [][]byte{r.encode()} },
		})
	}
	if s.onQuarantine != nil {
		s.onQuarantine(r)
	}
}
