#!/bin/sh
# Greet a customer: ./greet.sh Ada
echo "Good morning, ${1:-customer}!"
