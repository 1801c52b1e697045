"""Throwaway servers for the tests, PostgreSQL, Redis and OpenBao among them: started here, gone afterwards."""
