package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
)

func call(path, body string) (grant struct {
	Lease string
	Token uint64
}) {
	request, _ := http.NewRequest("POST", os.Getenv("LEASEHOLD_URL")+path, strings.NewReader(body))
	request.Header = http.Header{"Authorization": {"Bearer " + os.Getenv("LEASEHOLD_HTTP_TOKEN")}, "Content-Type": {"application/json"}}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		panic(err)
	}
	text, _ := io.ReadAll(answer.Body)
	if answer.StatusCode >= 400 {
		panic(string(text)) // names the remedy
	}
	json.Unmarshal(text, &grant)
	return grant
}

func main() {
	grant := call("/v1/locks/mutex/nightly-report/acquire", `{"wait_ms": 60000, "ttl_ms": 30000}`)
	fmt.Println("token", grant.Token) // the work; it must end within expires_in_ms, or renew the lease
	call("/v1/locks/mutex/nightly-report/release", fmt.Sprintf(`{"lease": %q}`, grant.Lease))
}
