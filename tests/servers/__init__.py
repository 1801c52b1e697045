"""Throwaway PostgreSQL and Redis servers for the tests: started here, gone afterwards."""
