"""What benchmarks share: `serving` starts servers, `loads` and `measure` load them, `sample` and `report` compute."""
