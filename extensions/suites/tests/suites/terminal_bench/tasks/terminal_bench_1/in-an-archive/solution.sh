#!/bin/bash
tar -czf data.tar.gz data
