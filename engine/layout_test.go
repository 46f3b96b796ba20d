package engine

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestLayout_JournalCountIsFixedAtCreation(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new", "data")
	if l, err := openLayout(dir, 3); err != nil || l.Journals != 3 {
		t.Fatalf("creating: %+v, %v", l, err)
	}
	if l, err := openLayout(dir, 0); err != nil || l.Journals != 3 {
		t.Errorf("opening without a wish: %+v, %v", l, err)
	}
	if l, err := openLayout(dir, 3); err != nil || l.Journals != 3 {
		t.Errorf("opening with the same number: %+v, %v", l, err)
	}
	if _, err := openLayout(dir, 2); err == nil || !strings.Contains(err.Error(), "shards") {
		t.Errorf("another number was not refused by name: %v", err)
	}
}

func TestLayout_DamageIsNamed(t *testing.T) {
	for name, content := range map[string]string{
		"garbage": "}{", "future format": `{"format":9,"journals":1}`, "impossible count": `{"format":1,"journals":0}`,
	} {
		dir := t.TempDir()
		path := filepath.Join(dir, layoutFile)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := openLayout(dir, 0); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: error does not name the file: %v", name, err)
		}
	}
}

func TestFifo_KeepsOrderAndReusesItsSlice(t *testing.T) {
	var q fifo[int]
	next, want := 0, 0
	for round := range 1000 {
		for range round % 7 {
			q.push(next)
			next++
		}
		for q.len() > 0 && (round%3 == 0 || q.len() > 5) {
			if got := *q.front(); got != want {
				t.Fatalf("got %d, want %d", got, want)
			}
			q.pop()
			want++
		}
	}
	if n := testing.AllocsPerRun(100, func() {
		for i := range 50 {
			q.push(i)
		}
		for q.len() > 0 {
			q.pop()
		}
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
}
