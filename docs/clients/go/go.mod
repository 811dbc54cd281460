module example.com/baton-client

go 1.19
