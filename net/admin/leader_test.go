package admin

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// Who needs the leader's view is not given a follower's, which is older.
func TestStats_TheLeadersViewIsHadOfTheLeader(t *testing.T) {
	for _, c := range []struct {
		leader int
		path   string
		status int
		about  string
	}{
		{3, "/stats?topic=orders&leader=required", http.StatusOK, "orders"},
		{5, "/stats?topic=orders", http.StatusOK, "orders"},
		{5, "/stats?topic=orders&leader=required", http.StatusMisdirectedRequest, "ask node 5"},
		{5, "/topics", http.StatusOK, "orders"},
		{5, "/topics?leader=required", http.StatusMisdirectedRequest, "ask node 5"},
		{5, "/groups?leader=required", http.StatusMisdirectedRequest, "ask node 5"},
		{-1, "/stats?topic=orders&leader=required", http.StatusMisdirectedRequest, "knows no leader"},
	} {
		s := New(Options{Source: &fakeSource{leader: c.leader}})
		w := httptest.NewRecorder()
		s.http.Handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, c.path, nil))
		if w.Code != c.status || !strings.Contains(w.Body.String(), c.about) {
			t.Errorf("%s with leader %d: %d, %s", c.path, c.leader, w.Code, w.Body)
		}
	}
}
