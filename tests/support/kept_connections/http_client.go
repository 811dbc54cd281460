// Sends POST requests, one after the other, until its input ends.
//
//	go run http_client.go URL
//
// Prints {"answered": N, "failures": [...]}.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"
)

func send(url string) error {
	answer, err := http.Post(url, "application/json", strings.NewReader(`{"prompt": "import os"}`))
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode != 200 {
		err = fmt.Errorf("%d %s", answer.StatusCode, body)
	}
	return err
}

func main() {
	ended := make(chan bool)
	go func() {
		io.Copy(io.Discard, os.Stdin)
		close(ended)
	}()
	answered, failures := 0, []string{}
	for {
		select {
		case <-ended:
			json.NewEncoder(os.Stdout).Encode(map[string]any{"answered": answered, "failures": failures})
			return
		case <-time.After(5 * time.Millisecond):
			if err := send(os.Args[1]); err != nil {
				failures = append(failures, err.Error())
			} else {
				answered++
			}
		}
	}
}
