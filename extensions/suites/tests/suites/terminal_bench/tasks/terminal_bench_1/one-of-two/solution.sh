#!/bin/bash
touch a
