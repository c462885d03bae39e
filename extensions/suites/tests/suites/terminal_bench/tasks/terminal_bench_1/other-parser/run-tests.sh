#!/bin/bash
source $TEST_DIR/setup-uv-pytest.sh
source $TEST_DIR/run-uv-pytest.sh
